"""What turns a fresh Debian machine into one that can run Outrider's demo and tests.

Standard library only: these scripts run before there is a virtual environment.
"""

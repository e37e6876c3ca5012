"""What stands in a pod: its template, containers, volumes and placement.

Serving pods share it with the pods of Jobs that profile and that download models.
"""

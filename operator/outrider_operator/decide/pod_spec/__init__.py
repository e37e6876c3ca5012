"""What stands in a pod: its template, containers, volumes and placement. Serving pods and profiling Jobs share it."""

"""`raykv.connect()`: the cluster from outside, composed of parts."""

"""The metrics' table, histograms and sketches, the server, and how Prometheus finds it."""

"""The metrics' table, histograms and sketches, the server, and what tells Prometheus of it."""

"""`raykv demo`: long documents asked about in rounds, with and without RayKV."""

"""Records, shards and objects: everything that lies on disk or in a bucket. Knows no models, imports no torch."""

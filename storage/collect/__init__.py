"""Image collection: downloads caption lists or imports local files into shards of the `images` stage."""

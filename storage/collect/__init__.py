"""Image collection: downloads or imports the images of caption lists into shards of the `images` stage."""

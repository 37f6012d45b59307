"""How images come in: caption lists and files of others -> shards of the stage `images`."""

"""Import paths of Monarch that its programs use although they are private. Everything here has its home elsewhere."""

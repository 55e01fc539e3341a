"""Import paths of Monarch's tools that programs use. Everything here has its home elsewhere."""

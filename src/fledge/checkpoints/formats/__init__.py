"""The config and tensor spellings of other projects. Nothing outside this package sees them."""

"""Model directories: reading, checking and writing them. All foreign spellings end here."""

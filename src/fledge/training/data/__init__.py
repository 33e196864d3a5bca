"""From files of conversations to packed rows of tokens with exact answer masks."""

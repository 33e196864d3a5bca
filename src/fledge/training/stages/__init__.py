"""The stages of `fledge train`, one file each. A stage reads what earlier ones wrote and fills one directory."""

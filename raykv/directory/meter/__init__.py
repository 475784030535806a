"""What the directory counts: chunks and their ages, what engines report, whether storing pays."""

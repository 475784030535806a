"""What everything else is written in: ids, errors, settings, deadlines, parsing, threads."""

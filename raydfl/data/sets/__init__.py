"""One file per data set; the file name is its name in a configuration."""

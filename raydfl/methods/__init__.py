"""One file per federated method; the file name is its name in a configuration."""

"""The store behind the bucket: operations as values, retries, and objects that are checked before use."""

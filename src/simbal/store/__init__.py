"""Runs in a store that several machines reach, such as a bucket of S3: brought there, fetched, and held by one."""

"""The elastic reducer: members meet only in a folder or an object store (docs/bucket-protocol.md)."""

from diloco.bucket.bucket import Bucket as Bucket
from diloco.bucket.run import below as below
from diloco.bucket.run import find_run as find_run

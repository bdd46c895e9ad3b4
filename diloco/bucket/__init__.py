"""The elastic reducer: members meet in a folder or an object store and nothing else. The protocol is in
docs/bucket.md."""

from diloco.bucket.bucket import Bucket as Bucket
from diloco.bucket.run import below as below
from diloco.bucket.run import find_run as find_run

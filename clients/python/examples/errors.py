"""Read what is wrong with a request: python errors.py ADDRESS."""

import sys

from runnerd_client import Client, InvalidRequestError, NotFoundError, OverloadedError

if len(sys.argv) != 2:
    sys.exit("usage: python errors.py ADDRESS")
with Client(sys.argv[1]) as client:
    try:
        client.generate("hello", temperature=-1, top_p=7)
    except InvalidRequestError as error:
        for violation in error.violations:
            print(f"{violation.field}: {violation.description}")
    try:
        client.generate("hello", model="another")
    except NotFoundError as error:
        print(f"{error.reason}: {error}")
    except OverloadedError as error:
        print(f"full; again in {error.retry_after} s")

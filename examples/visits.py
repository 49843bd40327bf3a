"""Print rows of visits, 1,000 for each minute: `visits.py FIRST COUNT`."""

import sys
from datetime import datetime, timedelta

first, count = map(int, sys.argv[1:])
for number in range(first, first + count):
    at = datetime(2026, 11, 22) + timedelta(milliseconds=60 * number)
    print(f'["{at:%Y-%m-%d %H:%M:%S}","/page/{number % 7}"]')

"""The leaderboard of run folders: figures by upstream's definitions, tables, a page, and what two runs differ in."""

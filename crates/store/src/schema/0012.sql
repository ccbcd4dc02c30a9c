CREATE TABLE diffs (
    session TEXT PRIMARY KEY REFERENCES sessions (id) ON DELETE CASCADE,
    text TEXT NOT NULL
);

INSERT INTO diffs (session, text) SELECT id, diff FROM sessions WHERE diff IS NOT NULL;

ALTER TABLE sessions DROP COLUMN diff;

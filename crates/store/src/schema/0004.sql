CREATE TABLE checkouts (
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    place BIGINT NOT NULL,
    repository TEXT NOT NULL,
    base TEXT,
    base_commit TEXT,
    pushed_commit TEXT,
    reviewed_commit TEXT,
    PRIMARY KEY (session, place)
);

CREATE UNIQUE INDEX checkouts_by_name ON checkouts (session, repository);

CREATE INDEX checkouts_of_repository ON checkouts (repository);

INSERT INTO checkouts (session, place, repository, base, base_commit, pushed_commit, reviewed_commit)
    SELECT id, 0, repository, base, base_commit, pushed_commit, reviewed_commit FROM sessions;

ALTER TABLE sessions DROP COLUMN base;

ALTER TABLE sessions DROP COLUMN base_commit;

ALTER TABLE sessions DROP COLUMN pushed_commit;

ALTER TABLE sessions DROP COLUMN reviewed_commit;

CREATE TABLE session_pulls (
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    repository TEXT NOT NULL,
    number BIGINT NOT NULL,
    pull TEXT NOT NULL,
    updated_at BIGINT NOT NULL,
    PRIMARY KEY (session, repository)
);

INSERT INTO session_pulls (session, repository, number, pull, updated_at)
    SELECT session, repository, number, pull, updated_at FROM pulls;

DROP TABLE pulls;

ALTER TABLE session_pulls RENAME TO pulls;

ALTER TABLE sessions ADD COLUMN key TEXT;

CREATE UNIQUE INDEX sessions_by_key ON sessions (key) WHERE key IS NOT NULL;

ALTER TABLE sessions ADD COLUMN env TEXT NOT NULL DEFAULT '{}';

ALTER TABLE sessions ADD COLUMN forked_turn BIGINT;

UPDATE repositories SET url = 'http://forge.harvest.internal/' || name || '.git'
    WHERE url LIKE 'http://127.0.0.1:%/forge/' || name || '.git'

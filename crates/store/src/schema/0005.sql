CREATE TABLE removals (
    kind TEXT NOT NULL,
    id TEXT NOT NULL,
    created_at BIGINT NOT NULL,
    PRIMARY KEY (kind, id)
);

ALTER TABLE snapshots ADD COLUMN pinned BIGINT NOT NULL DEFAULT 0;

ALTER TABLE snapshots ADD COLUMN gone BIGINT NOT NULL DEFAULT 0;

ALTER TABLE turns ADD COLUMN dropped TEXT;

ALTER TABLE turns ADD COLUMN after_turn BIGINT;

ALTER TABLE turns ADD COLUMN input_tokens BIGINT NOT NULL DEFAULT 0;

ALTER TABLE turns ADD COLUMN output_tokens BIGINT NOT NULL DEFAULT 0;

ALTER TABLE turns ADD COLUMN cache_read_tokens BIGINT NOT NULL DEFAULT 0;

ALTER TABLE turns ADD COLUMN cache_write_tokens BIGINT NOT NULL DEFAULT 0;

CREATE TABLE turn_trees (
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    number BIGINT NOT NULL,
    repository TEXT NOT NULL,
    tree TEXT NOT NULL,
    files BIGINT NOT NULL,
    insertions BIGINT NOT NULL,
    deletions BIGINT NOT NULL,
    PRIMARY KEY (session, number, repository)
);

CREATE TABLE blobs (
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    id TEXT NOT NULL,
    bytes BIGINT NOT NULL,
    created_at BIGINT NOT NULL,
    PRIMARY KEY (session, id)
);

CREATE TABLE blob_pieces (
    session TEXT NOT NULL,
    id TEXT NOT NULL,
    number BIGINT NOT NULL,
    text TEXT NOT NULL,
    PRIMARY KEY (session, id, number),
    FOREIGN KEY (session, id) REFERENCES blobs (session, id) ON DELETE CASCADE
);

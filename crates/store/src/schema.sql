CREATE TABLE meta (
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL
);

CREATE TABLE leases (
    name TEXT PRIMARY KEY,
    number BIGINT NOT NULL,
    taken_at BIGINT NOT NULL
);

CREATE TABLE sessions (
    id TEXT PRIMARY KEY,
    key TEXT,
    key_owner TEXT,
    title TEXT NOT NULL,
    state TEXT NOT NULL,
    reason TEXT NOT NULL,
    position BIGINT,
    repository TEXT,
    branch TEXT NOT NULL,
    agent TEXT NOT NULL,
    model TEXT,
    effort TEXT,
    network TEXT NOT NULL,
    provider TEXT NOT NULL,
    env TEXT NOT NULL,
    no_questions BIGINT NOT NULL,
    pr_mode TEXT,
    author_name TEXT NOT NULL,
    author_email TEXT NOT NULL,
    conversation TEXT NOT NULL,
    sandbox TEXT,
    epoch BIGINT NOT NULL DEFAULT 0,
    snapshot TEXT,
    forked_from TEXT,
    forked_turn BIGINT,
    driver_state TEXT NOT NULL,
    resting BIGINT NOT NULL DEFAULT 0,
    input_tokens BIGINT NOT NULL DEFAULT 0,
    output_tokens BIGINT NOT NULL DEFAULT 0,
    cache_read_tokens BIGINT NOT NULL DEFAULT 0,
    cache_write_tokens BIGINT NOT NULL DEFAULT 0,
    next_seq BIGINT NOT NULL DEFAULT 1,
    history_bytes BIGINT NOT NULL DEFAULT 0,
    created_at BIGINT NOT NULL,
    last_activity BIGINT NOT NULL
);

CREATE INDEX sessions_by_age ON sessions (created_at, id);

CREATE INDEX sessions_open ON sessions (created_at, id) WHERE state <> 'archived';

CREATE INDEX sessions_by_state ON sessions (state, created_at, id);

CREATE INDEX sessions_at_work ON sessions (id) WHERE resting = 0;

CREATE UNIQUE INDEX sessions_by_key ON sessions (key_owner, key) WHERE key IS NOT NULL;

CREATE TABLE pool_members (
    session TEXT PRIMARY KEY,
    sandbox TEXT NOT NULL UNIQUE,
    repository TEXT NOT NULL,
    conversation TEXT NOT NULL,
    spec TEXT NOT NULL,
    ready BIGINT NOT NULL,
    warnings TEXT NOT NULL,
    created_at BIGINT NOT NULL
);

CREATE TABLE child_sessions (
    session TEXT PRIMARY KEY REFERENCES sessions (id) ON DELETE CASCADE,
    parent TEXT NOT NULL,
    root TEXT NOT NULL
);

CREATE INDEX child_sessions_of_root ON child_sessions (root);

CREATE TABLE checkouts (
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    position BIGINT NOT NULL,
    repository TEXT NOT NULL,
    folder TEXT NOT NULL,
    base TEXT,
    base_commit TEXT,
    pushed_commit TEXT,
    reviewed_commit TEXT,
    PRIMARY KEY (session, position)
);

CREATE UNIQUE INDEX checkouts_by_name ON checkouts (session, repository);

CREATE INDEX checkouts_of_repository ON checkouts (repository);

CREATE INDEX checkouts_unreviewed ON checkouts (session)
    WHERE pushed_commit IS NOT NULL AND (reviewed_commit IS NULL OR reviewed_commit <> pushed_commit);

CREATE TABLE pushed_commits (
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    repository TEXT NOT NULL,
    commit_id TEXT NOT NULL,
    accepted BIGINT NOT NULL,
    replaced BIGINT NOT NULL,
    PRIMARY KEY (session, repository, commit_id)
);

CREATE TABLE prompts (
    id TEXT PRIMARY KEY,
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    text TEXT NOT NULL,
    author_name TEXT NOT NULL,
    author_email TEXT NOT NULL,
    agent TEXT,
    model TEXT,
    effort TEXT,
    attachments TEXT NOT NULL,
    status TEXT NOT NULL,
    position BIGINT NOT NULL,
    turn TEXT,
    seq BIGINT NOT NULL,
    created_at BIGINT NOT NULL
);

CREATE INDEX prompts_of_session ON prompts (session, seq);

CREATE INDEX prompts_queued ON prompts (session) WHERE status = 'queued';

CREATE UNIQUE INDEX prompts_one_dispatched ON prompts (session) WHERE status = 'dispatched';

CREATE TABLE attachments (
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    prompt TEXT NOT NULL,
    number BIGINT NOT NULL,
    base64 TEXT NOT NULL,
    PRIMARY KEY (session, prompt, number)
);

CREATE TABLE turns (
    id TEXT PRIMARY KEY,
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    number BIGINT NOT NULL,
    prompt TEXT NOT NULL,
    after_turn BIGINT,
    outcome TEXT,
    reason TEXT,
    snapshot TEXT,
    drop_reason TEXT,
    input_tokens BIGINT NOT NULL DEFAULT 0,
    output_tokens BIGINT NOT NULL DEFAULT 0,
    cache_read_tokens BIGINT NOT NULL DEFAULT 0,
    cache_write_tokens BIGINT NOT NULL DEFAULT 0,
    spent BIGINT NOT NULL DEFAULT 0,
    started_at BIGINT NOT NULL,
    ended_at BIGINT,
    UNIQUE (session, number)
);

CREATE INDEX turns_over_budget ON turns (session) WHERE reason = 'budget';

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

CREATE TABLE events (
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    seq BIGINT NOT NULL,
    at BIGINT NOT NULL,
    turn TEXT,
    body TEXT NOT NULL,
    PRIMARY KEY (session, seq)
);

CREATE TABLE outboxes (
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    epoch BIGINT NOT NULL,
    stored BIGINT NOT NULL,
    PRIMARY KEY (session, epoch)
);

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

CREATE TABLE diffs (
    session TEXT PRIMARY KEY REFERENCES sessions (id) ON DELETE CASCADE,
    text TEXT NOT NULL
);

CREATE TABLE agent_infos (
    session TEXT PRIMARY KEY REFERENCES sessions (id) ON DELETE CASCADE,
    info TEXT NOT NULL
);

CREATE TABLE artifacts (
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    name TEXT NOT NULL,
    media_type TEXT NOT NULL,
    bytes BIGINT NOT NULL,
    sha256 TEXT NOT NULL,
    created_at BIGINT NOT NULL,
    PRIMARY KEY (session, name)
);

CREATE INDEX artifacts_by_content ON artifacts (sha256);

CREATE TABLE snapshots (
    id TEXT NOT NULL,
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    kind TEXT NOT NULL,
    turn BIGINT,
    pinned BIGINT NOT NULL DEFAULT 0,
    gone BIGINT NOT NULL DEFAULT 0,
    name TEXT,
    created_at BIGINT NOT NULL,
    PRIMARY KEY (session, id)
);

CREATE INDEX snapshots_by_id ON snapshots (id);

CREATE TABLE pull_requests (
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    repository TEXT NOT NULL,
    state TEXT NOT NULL,
    pull_request TEXT NOT NULL,
    PRIMARY KEY (session, repository)
);

CREATE INDEX pull_requests_by_state ON pull_requests (state);

CREATE TABLE user_limits (
    email TEXT PRIMARY KEY,
    sandboxes BIGINT,
    memory_bytes BIGINT,
    cpu_millis_per_second BIGINT,
    writable_bytes BIGINT,
    lifetime_secs BIGINT
);

CREATE TABLE webhook_deliveries (
    id TEXT PRIMARY KEY,
    event TEXT NOT NULL,
    action TEXT NOT NULL,
    repository TEXT NOT NULL,
    payload TEXT,
    received_at BIGINT NOT NULL
);

CREATE INDEX webhook_deliveries_by_time ON webhook_deliveries (received_at);

CREATE TABLE repositories (
    name TEXT PRIMARY KEY,
    url TEXT NOT NULL,
    base TEXT,
    secret TEXT,
    image TEXT,
    memory_seeded BIGINT NOT NULL DEFAULT 0,
    created_at BIGINT NOT NULL
);

CREATE TABLE builds (
    snapshot TEXT PRIMARY KEY,
    repository TEXT NOT NULL REFERENCES repositories (name) ON DELETE CASCADE,
    status TEXT NOT NULL,
    provider TEXT NOT NULL,
    branch TEXT NOT NULL DEFAULT '',
    commit_id TEXT,
    base_image TEXT NOT NULL DEFAULT '',
    base_image_id TEXT,
    layers BIGINT NOT NULL DEFAULT 1,
    package_manager TEXT,
    check_evidence TEXT,
    config TEXT,
    error TEXT,
    log TEXT NOT NULL DEFAULT '',
    millis BIGINT NOT NULL DEFAULT 0,
    started_at BIGINT NOT NULL,
    built_at BIGINT
);

CREATE INDEX builds_of_repository ON builds (repository, started_at);

CREATE UNIQUE INDEX builds_one_at_a_time ON builds (repository) WHERE status = 'building';

CREATE TABLE verifications (
    id TEXT PRIMARY KEY,
    repository TEXT NOT NULL REFERENCES repositories (name) ON DELETE CASCADE,
    session TEXT REFERENCES sessions (id) ON DELETE CASCADE,
    revision TEXT NOT NULL,
    pull_request BIGINT,
    commit_id TEXT NOT NULL,
    base TEXT,
    status TEXT NOT NULL,
    snapshot TEXT,
    evidence TEXT,
    error TEXT,
    unpublished TEXT,
    started_at BIGINT NOT NULL,
    ended_at BIGINT
);

CREATE INDEX verifications_of_repository ON verifications (repository, started_at);

CREATE INDEX verifications_of_session ON verifications (session);

CREATE INDEX verifications_by_end ON verifications (ended_at);

CREATE TABLE schedule_runs (
    at BIGINT PRIMARY KEY,
    status TEXT NOT NULL,
    started_at BIGINT NOT NULL,
    ended_at BIGINT,
    attempts BIGINT NOT NULL,
    rebuilt TEXT NOT NULL,
    images TEXT NOT NULL,
    tail TEXT NOT NULL
);

CREATE TABLE memory_entities (
    repository TEXT NOT NULL REFERENCES repositories (name) ON DELETE CASCADE,
    name TEXT NOT NULL,
    kind TEXT NOT NULL,
    position BIGINT NOT NULL,
    PRIMARY KEY (repository, name)
);

CREATE TABLE memory_observations (
    repository TEXT NOT NULL,
    entity TEXT NOT NULL,
    position BIGINT NOT NULL,
    text TEXT NOT NULL,
    PRIMARY KEY (repository, entity, position),
    FOREIGN KEY (repository, entity) REFERENCES memory_entities (repository, name) ON DELETE CASCADE
);

CREATE TABLE memory_relations (
    repository TEXT NOT NULL REFERENCES repositories (name) ON DELETE CASCADE,
    source TEXT NOT NULL,
    target TEXT NOT NULL,
    kind TEXT NOT NULL,
    position BIGINT NOT NULL,
    PRIMARY KEY (repository, source, target, kind)
);

CREATE INDEX memory_relations_by_target ON memory_relations (repository, target);

CREATE TABLE network_rules (
    session TEXT REFERENCES sessions (id) ON DELETE CASCADE,
    repository TEXT REFERENCES repositories (name) ON DELETE CASCADE,
    name TEXT NOT NULL,
    verdict TEXT NOT NULL,
    ports TEXT NOT NULL,
    private BIGINT NOT NULL
);

CREATE INDEX network_rules_of_session ON network_rules (session);

CREATE INDEX network_rules_of_repository ON network_rules (repository);

CREATE TABLE network_log (
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    turn BIGINT NOT NULL,
    name TEXT NOT NULL,
    port BIGINT NOT NULL,
    verdict TEXT NOT NULL,
    connections BIGINT NOT NULL,
    sent BIGINT NOT NULL,
    received BIGINT NOT NULL,
    first_at BIGINT NOT NULL,
    last_at BIGINT NOT NULL,
    PRIMARY KEY (session, turn, name, port, verdict)
);

CREATE TABLE budgets (
    owner TEXT PRIMARY KEY,
    budget BIGINT,
    spent BIGINT NOT NULL DEFAULT 0,
    held BIGINT NOT NULL DEFAULT 0,
    tokens BIGINT NOT NULL DEFAULT 0
);

CREATE INDEX budgets_limited ON budgets (owner) WHERE budget IS NOT NULL;

CREATE TABLE calls (
    id TEXT PRIMARY KEY,
    session TEXT,
    root TEXT,
    turn TEXT,
    repository TEXT,
    user_email TEXT,
    day TEXT NOT NULL,
    upstream TEXT NOT NULL,
    model TEXT NOT NULL,
    input_tokens BIGINT NOT NULL,
    output_tokens BIGINT NOT NULL,
    cache_read_tokens BIGINT NOT NULL,
    cache_write_tokens BIGINT NOT NULL,
    micros BIGINT NOT NULL,
    priced BIGINT NOT NULL,
    lease BIGINT,
    at BIGINT NOT NULL
);

CREATE INDEX calls_by_time ON calls (at);

CREATE INDEX calls_unsettled ON calls (lease) WHERE lease IS NOT NULL;

CREATE TABLE compute_meters (
    sandbox TEXT PRIMARY KEY,
    cpu BIGINT NOT NULL,
    memory BIGINT NOT NULL,
    at BIGINT NOT NULL
);

CREATE INDEX compute_meters_by_age ON compute_meters (at);

CREATE TABLE compute (
    session TEXT NOT NULL,
    repository TEXT NOT NULL,
    user_email TEXT NOT NULL,
    day TEXT NOT NULL,
    hour BIGINT NOT NULL,
    cpu BIGINT NOT NULL,
    memory BIGINT NOT NULL,
    PRIMARY KEY (session, repository, user_email, hour)
);

CREATE INDEX compute_by_hour ON compute (hour);

CREATE TABLE removals (
    kind TEXT NOT NULL,
    id TEXT NOT NULL,
    created_at BIGINT NOT NULL,
    PRIMARY KEY (kind, id)
);

CREATE TABLE secrets (
    owner TEXT NOT NULL,
    name TEXT NOT NULL,
    session TEXT REFERENCES sessions (id) ON DELETE CASCADE,
    repository TEXT REFERENCES repositories (name) ON DELETE CASCADE,
    sealed TEXT NOT NULL,
    hosts TEXT,
    header TEXT,
    updated_at BIGINT NOT NULL,
    PRIMARY KEY (owner, name)
);

CREATE INDEX secrets_of_session ON secrets (session);

CREATE INDEX secrets_of_repository ON secrets (repository);

CREATE TABLE secret_uses (
    number BIGINT PRIMARY KEY,
    name TEXT NOT NULL,
    scope TEXT NOT NULL,
    session TEXT REFERENCES sessions (id) ON DELETE CASCADE,
    turn BIGINT NOT NULL,
    host TEXT NOT NULL,
    method TEXT NOT NULL,
    path TEXT NOT NULL,
    at BIGINT NOT NULL
);

CREATE INDEX secret_uses_of_name ON secret_uses (name, number);

CREATE INDEX secret_uses_of_session ON secret_uses (session);

CREATE TABLE tokens (
    hash TEXT PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    user_name TEXT NOT NULL,
    user_email TEXT NOT NULL,
    role TEXT NOT NULL,
    created_at BIGINT NOT NULL,
    last_used BIGINT
);

CREATE TABLE idempotency_keys (
    key TEXT PRIMARY KEY,
    request_hash TEXT NOT NULL,
    response TEXT,
    created_at BIGINT NOT NULL
);

CREATE INDEX idempotency_keys_by_age ON idempotency_keys (created_at);

CREATE INDEX idempotency_keys_in_flight ON idempotency_keys (key) WHERE response IS NULL;

CREATE TABLE idempotency_ids (
    key TEXT NOT NULL REFERENCES idempotency_keys (key) ON DELETE CASCADE,
    position BIGINT NOT NULL,
    id TEXT NOT NULL,
    PRIMARY KEY (key, position)
);

CREATE INDEX idempotency_ids_by_id ON idempotency_ids (id);

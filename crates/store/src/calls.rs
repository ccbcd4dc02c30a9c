//! Model calls: one row each. A row is written before its call with the most that the call may
//! cost, which the budgets hold from then on, and is settled after it. What a killed server left
//! unsettled is charged as held.

use harvest_proto::{
    CallId, Money, SessionId, SpendingScope, Timestamp, UpstreamName, api::Spending, event::Usage,
};

use crate::{
    DbConnection, DbRow, Lease, Store, StoreError,
    budgets::{self, OverBudget, day_key, user_key},
    compute::hour_of,
    leases,
    reserve::OnFullDisk,
    row::{self, MAX_COUNT, bigint, bounded, replace_nul},
};

const SELECT: &str = "SELECT id, session, root, turn, repository, user_email, day, input_tokens,
     output_tokens, cache_read_tokens, cache_write_tokens, micros, priced FROM calls";

const SUMS: [&str; 9] = [
    "calls",
    "input_tokens",
    "output_tokens",
    "cache_read_tokens",
    "cache_write_tokens",
    "spent",
    "unpriced",
    "cpu",
    "memory",
];

/// A call that is about to be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewCall {
    pub id: CallId,
    /// Builds have a door too; theirs is not a stored session.
    pub session: SessionId,
    pub upstream: UpstreamName,
    pub model: String,
    /// The most tokens it may use.
    pub most: Usage,
    /// What these cost; `None` without a known price.
    pub cost: Option<Money>,
    pub at: Timestamp,
}

/// A row of a call in progress.
struct OpenCall {
    id: String,
    owner: CallOwner,
    day: String,
    usage: Usage,
    held: Money,
    /// Its price is known.
    priced: bool,
}

/// Whom a call is charged to.
#[derive(Default)]
struct CallOwner {
    session: Option<String>,
    /// The session at the root, if an agent created this one.
    root: Option<String>,
    turn: Option<String>,
    repository: Option<String>,
    user: Option<String>,
}

impl CallOwner {
    /// The keys of the budgets that a call counts against.
    fn keys(&self, day: &str) -> Vec<String> {
        let sessions = self.session.iter().chain(&self.root);
        let mut keys: Vec<_> = sessions.map(|id| format!("session:{id}")).collect();
        keys.extend(self.repository.as_ref().map(|name| format!("repository:{name}")));
        keys.extend(self.user.as_ref().map(|email| user_key(email)));
        keys.push(day_key(day));
        keys
    }
}

impl Store {
    /// Reserves what a call may cost, in every budget it counts against, or in none.
    pub async fn call_begin(
        &self,
        lease: Lease,
        call: NewCall,
        token_limit: Option<u64>,
    ) -> Result<Result<(), OverBudget>, StoreError> {
        self.writer
            .run(move |connection| {
                Box::pin(async move {
                    leases::check(connection, lease).await?;
                    begin(connection, lease, call, token_limit).await
                })
            })
            .await
    }

    /// Settles a call with what it used. Does nothing for one that is settled.
    pub async fn call_end(
        &self,
        lease: Lease,
        call: &CallId,
        usage: Usage,
        cost: Money,
    ) -> Result<(), StoreError> {
        let id = call.to_string();
        self.writer
            .run_on(OnFullDisk::UseReserve, move |connection| {
                Box::pin(async move {
                    leases::check(connection, lease).await?;
                    let row = sqlx::query(sqlx::AssertSqlSafe(format!(
                        "{SELECT} WHERE id = $1 AND lease IS NOT NULL"
                    )))
                    .bind(id)
                    .fetch_optional(&mut *connection)
                    .await?;
                    match row {
                        Some(row) => settle(connection, &read(&row)?, usage, cost).await,
                        None => Ok(()),
                    }
                })
            })
            .await
    }

    /// The sums of calls since a time, and of CPU time and memory since the hour it is in, the most
    /// expensive first, at most `limit`.
    pub async fn spending(
        &self,
        by: SpendingScope,
        since: Timestamp,
        limit: u32,
    ) -> Result<Vec<Spending>, StoreError> {
        let column = match by {
            SpendingScope::Session => "session",
            SpendingScope::Repository => "repository",
            SpendingScope::User => "user_email",
            SpendingScope::Day => "day",
        };
        let sum = |name: &str| format!("CAST(SUM({name}) AS BIGINT) AS {name}");
        let sums = SUMS.map(sum).join(", ");
        // Both parts have the same columns; what one does not know is zero.
        let sql = format!(
            "SELECT name, {sums} FROM (
                 SELECT COALESCE({column}, '') AS name, 1 AS calls, input_tokens, output_tokens,
                     cache_read_tokens, cache_write_tokens, micros AS spent, 1 - priced AS unpriced,
                     0 AS cpu, 0 AS memory
                 FROM calls WHERE at >= $1 AND lease IS NULL
                 UNION ALL
                 SELECT {column}, 0, 0, 0, 0, 0, 0, 0, cpu, memory FROM compute WHERE hour >= $2
             ) AS sums GROUP BY name ORDER BY spent DESC, calls DESC, cpu DESC, name LIMIT $3"
        );
        let query = sqlx::query(sqlx::AssertSqlSafe(sql)).bind(since.as_millis());
        self.all(query.bind(hour_of(since)).bind(i64::from(limit)), read_sums).await
    }

    /// Charges the calls that earlier servers left unsettled as they were held. Returns their
    /// number.
    pub async fn call_charge_unsettled(&self, lease: Lease) -> Result<usize, StoreError> {
        self.writer
            .run_on(OnFullDisk::UseReserve, move |connection| {
                Box::pin(async move {
                    leases::check(connection, lease).await?;
                    let rows = sqlx::query(sqlx::AssertSqlSafe(format!(
                        "{SELECT} WHERE lease IS NOT NULL AND lease < $1"
                    )))
                    .bind(bigint(lease.0))
                    .fetch_all(&mut *connection)
                    .await?;
                    for row in &rows {
                        let call = read(row)?;
                        settle(connection, &call, call.usage, call.held).await?;
                    }
                    Ok(rows.len())
                })
            })
            .await
    }
}

async fn begin(
    connection: &mut DbConnection,
    lease: Lease,
    call: NewCall,
    token_limit: Option<u64>,
) -> Result<Result<(), OverBudget>, StoreError> {
    let owner = owner_of(connection, &call.session).await?;
    let day = budgets::day(call.at);
    let keys = owner.keys(&day);
    let with_limit = keys.iter().cloned().chain([budgets::BudgetOwner::Day.key()]).collect();
    let accounts = budgets::load(connection, with_limit).await?;
    // The token limit is one of sessions; that of a root has the most.
    let used = accounts.iter().filter(|one| one.budget.scope == SpendingScope::Session);
    let used = used.map(|one| one.tokens).max().unwrap_or(0);
    if let Some(limit) = token_limit.filter(|limit| owner.session.is_some() && used >= *limit) {
        return Ok(Err(OverBudget::Tokens { used, limit }));
    }
    if let Err(over) = budgets::judge(&budgets::with_day(accounts, call.at), call.cost) {
        return Ok(Err(over));
    }
    let held = call.cost.unwrap_or(Money::ZERO);
    for key in keys {
        sqlx::query(
            "INSERT INTO budgets (owner, held) VALUES ($1, $2)
             ON CONFLICT (owner) DO UPDATE SET held = budgets.held + excluded.held",
        )
        .bind(key)
        .bind(bigint(held.micros()))
        .execute(&mut *connection)
        .await?;
    }
    insert(connection, lease, call, owner, day).await.map(Ok)
}

async fn insert(
    connection: &mut DbConnection,
    lease: Lease,
    call: NewCall,
    owner: CallOwner,
    day: String,
) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO calls (id, session, root, turn, repository, user_email, day, upstream, model,
             input_tokens, output_tokens, cache_read_tokens, cache_write_tokens, micros, priced,
             lease, at)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17)",
    )
    .bind(call.id.to_string())
    .bind(owner.session)
    .bind(owner.root)
    .bind(owner.turn)
    .bind(owner.repository)
    .bind(owner.user)
    .bind(day)
    .bind(call.upstream.to_string())
    .bind(replace_nul(call.model))
    .bind(bounded(call.most.input_tokens))
    .bind(bounded(call.most.output_tokens))
    .bind(bounded(call.most.cache_read_tokens))
    .bind(bounded(call.most.cache_write_tokens))
    .bind(bigint(call.cost.unwrap_or(Money::ZERO).micros()))
    .bind(i64::from(call.cost.is_some()))
    .bind(bigint(lease.0))
    .bind(call.at.as_millis())
    .execute(connection)
    .await?;
    Ok(())
}

/// Whom a call of this session is charged to, and the turn in progress.
async fn owner_of(
    connection: &mut DbConnection,
    session: &SessionId,
) -> Result<CallOwner, StoreError> {
    let found = sqlx::query(
        "SELECT s.id, s.repository, s.author_email,
         (SELECT root FROM child_sessions WHERE session = s.id) AS root,
         (SELECT turn FROM prompts WHERE session = s.id AND status = 'dispatched') AS turn
         FROM sessions s WHERE s.id = $1",
    )
    .bind(session.to_string())
    .fetch_optional(connection)
    .await?;
    let Some(found) = found else { return Ok(CallOwner::default()) };
    Ok(CallOwner {
        session: Some(row::text(&found, "id")?),
        root: row::optional(&found, "root")?,
        turn: row::optional(&found, "turn")?,
        repository: row::optional(&found, "repository")?,
        user: Some(row::text(&found, "author_email")?),
    })
}

/// Charges a call: its budgets hold it no longer.
async fn settle(
    connection: &mut DbConnection,
    call: &OpenCall,
    usage: Usage,
    cost: Money,
) -> Result<(), StoreError> {
    let tokens = [
        usage.input_tokens,
        usage.output_tokens,
        usage.cache_read_tokens,
        usage.cache_write_tokens,
    ]
    .map(bounded);
    let (cost, held) = (bigint(cost.micros()), bigint(call.held.micros()));
    for key in call.owner.keys(&call.day) {
        sqlx::query(sqlx::AssertSqlSafe(format!(
            "UPDATE budgets SET {}, {}, held = held - $4 WHERE owner = $1",
            add("spent", "$2", "$5"),
            add("tokens", "$3", "$5"),
        )))
        .bind(key)
        .bind(cost)
        .bind(tokens.iter().sum::<i64>().min(MAX_COUNT))
        .bind(held)
        .bind(MAX_COUNT)
        .execute(&mut *connection)
        .await?;
    }
    // A sandbox can make any number of calls that cost nothing: they leave no row.
    if cost == 0 && (call.priced || usage == Usage::default()) {
        sqlx::query("DELETE FROM calls WHERE id = $1")
            .bind(call.id.clone())
            .execute(&mut *connection)
            .await?;
    } else {
        sqlx::query(
            "UPDATE calls SET input_tokens = $2, output_tokens = $3, cache_read_tokens = $4,
             cache_write_tokens = $5, micros = $6, lease = NULL WHERE id = $1",
        )
        .bind(call.id.clone())
        .bind(tokens[0])
        .bind(tokens[1])
        .bind(tokens[2])
        .bind(tokens[3])
        .bind(cost)
        .execute(&mut *connection)
        .await?;
    }
    add_usage(connection, &call.owner, tokens, cost).await
}

/// Adds to the sums of the session and of the turn.
async fn add_usage(
    connection: &mut DbConnection,
    owner: &CallOwner,
    tokens: [i64; 4],
    cost: i64,
) -> Result<(), StoreError> {
    let counts = [
        add("input_tokens", "$2", "$6"),
        add("output_tokens", "$3", "$6"),
        add("cache_read_tokens", "$4", "$6"),
        add("cache_write_tokens", "$5", "$6"),
    ]
    .join(", ");
    let spent = add("spent", "$7", "$6");
    let session = format!("UPDATE sessions SET {counts} WHERE id = $1");
    let turn = format!("UPDATE turns SET {counts}, {spent} WHERE id = $1");
    let query = |sql: String, id: &Option<String>| {
        let query = sqlx::query(sqlx::AssertSqlSafe(sql)).bind(id.clone());
        tokens.into_iter().fold(query, |query, count| query.bind(count)).bind(MAX_COUNT)
    };
    query(session, &owner.session).execute(&mut *connection).await?;
    query(turn, &owner.turn).bind(cost).execute(connection).await?;
    Ok(())
}

/// Adds to a column up to a limit: beyond it a sum would overflow, and on SQLite become a float
/// that cannot be read.
fn add(column: &str, value: &str, most: &str) -> String {
    format!(
        "{column} = CASE WHEN {column} > {most} - {value} THEN {most} ELSE {column} + {value} END"
    )
}

fn read_sums(row: &DbRow) -> Result<Spending, StoreError> {
    Ok(Spending {
        name: row::text(row, "name")?,
        calls: row::count(row, "calls")?,
        usage: row::usage(row)?,
        spent_micros: Money::from_micros(row::count(row, "spent")?),
        unpriced_calls: row::count(row, "unpriced")?,
        cpu_millis: row::count::<u64>(row, "cpu")? / 1000,
        memory_mib_seconds: row::count::<u64>(row, "memory")? / 1024,
    })
}

fn read(row: &DbRow) -> Result<OpenCall, StoreError> {
    Ok(OpenCall {
        id: row::text(row, "id")?,
        owner: CallOwner {
            session: row::optional(row, "session")?,
            root: row::optional(row, "root")?,
            turn: row::optional(row, "turn")?,
            repository: row::optional(row, "repository")?,
            user: row::optional(row, "user_email")?,
        },
        day: row::text(row, "day")?,
        usage: row::usage(row)?,
        held: Money::from_micros(row::count(row, "micros")?),
        priced: row::count::<i64>(row, "priced")? != 0,
    })
}

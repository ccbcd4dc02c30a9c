//! Budgets: what sessions, repositories, users and the days of the server may spend, have spent,
//! and hold for model calls in progress. The rows of the calls are in `calls.rs`.

use harvest_proto::{Money, RepositoryName, SessionId, SpendingScope, Timestamp, api::Budget};

use crate::{
    DbConnection, DbRow, Store, StoreError,
    reserve::OnFullDisk,
    row::{self, bigint},
};

const DAY: &str = "day";

/// What a budget belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BudgetOwner {
    /// A session, with those that its agent created.
    Session(SessionId),
    Repository(RepositoryName),
    /// By e-mail address.
    User(String),
    /// Every day (UTC) of the server.
    Day,
}

impl BudgetOwner {
    /// The key of the row with its limit.
    pub(crate) fn key(&self) -> String {
        match self {
            Self::Session(session) => format!("session:{session}"),
            Self::Repository(name) => format!("repository:{name}"),
            Self::User(email) => user_key(email),
            Self::Day => DAY.to_owned(),
        }
    }
}

// Users are the same whatever the case of their address.
pub(crate) fn user_key(email: &str) -> String {
    format!("user:{}", email.to_ascii_lowercase())
}

/// The date of a time, in UTC.
pub(crate) fn day(at: Timestamp) -> String {
    at.to_string().chars().take("2026-01-31".len()).collect()
}

pub(crate) fn day_key(day: &str) -> String {
    format!("{DAY}:{day}")
}

/// Why a model call may not be made now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OverBudget {
    /// The token limit is used up.
    Tokens { used: u64, limit: u64 },
    /// The call may cost more than is left.
    Money { budget: Budget, call: Money },
    /// There is a limit, and the price of the call is unknown.
    Unpriced { budget: Budget },
}

impl OverBudget {
    /// Whether the call would fit if the calls in progress cost nothing.
    #[must_use]
    pub fn may_fit_later(&self) -> bool {
        match self {
            Self::Money { budget, call } => {
                budget.budget_micros.is_some_and(|limit| budget.spent_micros.plus(*call) <= limit)
            }
            Self::Tokens { .. } | Self::Unpriced { .. } => false,
        }
    }
}

/// A row of the table.
pub(crate) struct Account {
    pub(crate) budget: Budget,
    pub(crate) tokens: u64,
}

/// Whether a call of this cost, if its price is known, fits into every budget. Pure.
pub(crate) fn judge(accounts: &[Budget], call: Option<Money>) -> Result<(), OverBudget> {
    for budget in accounts {
        let Some(limit) = budget.budget_micros else { continue };
        let Some(call) = call else { return Err(OverBudget::Unpriced { budget: budget.clone() }) };
        // A free call fits even when a limit was lowered below what is spent.
        let taken = budget.spent_micros.plus(budget.held_micros).plus(call);
        if call > Money::ZERO && taken > limit {
            return Err(OverBudget::Money { budget: budget.clone(), call });
        }
    }
    Ok(())
}

impl Store {
    /// Sets or removes a limit. Returns the budget.
    pub async fn budget_set(
        &self,
        owner: &BudgetOwner,
        limit: Option<Money>,
        at: Timestamp,
    ) -> Result<Budget, StoreError> {
        let owner = owner.clone();
        self.writer
            .run_on(OnFullDisk::UseReserve, move |connection| {
                Box::pin(async move {
                    set(connection, &owner, limit).await?;
                    let keys = vec![owner.key(), day_key(&day(at))];
                    // The day is the first, and alone if it is the owner.
                    let all = with_day(load(connection, keys).await?, at);
                    all.into_iter().last().ok_or_else(|| StoreError::missing("budget"))
                })
            })
            .await
    }

    /// The budget of the day, and those of repositories and users that have a limit.
    pub async fn budget_list(&self, at: Timestamp) -> Result<Vec<Budget>, StoreError> {
        let today = day_key(&day(at));
        // Sessions, of which there may be many, are between the two bounds.
        let query = sqlx::query(
            "SELECT owner, budget, spent, held, tokens FROM budgets
             WHERE (budget IS NOT NULL AND (owner < 'session:' OR owner >= 'session;'))
             OR owner = $1 ORDER BY owner",
        )
        .bind(today);
        Ok(with_day(self.all(query, read).await?, at))
    }
}

/// The budgets of these rows, that of the day first: its limit and what was spent are two rows.
pub(crate) fn with_day(accounts: Vec<Account>, at: Timestamp) -> Vec<Budget> {
    let budgets = accounts.into_iter().map(|one| one.budget);
    let (days, others): (Vec<_>, Vec<_>) =
        budgets.partition(|budget| budget.scope == SpendingScope::Day);
    let (limits, spent): (Vec<_>, Vec<_>) =
        days.into_iter().partition(|budget| budget.name.is_empty());
    let name = day(at);
    let spent = spent.into_iter().find(|budget| budget.name == name);
    let today = Budget {
        scope: SpendingScope::Day,
        name,
        budget_micros: limits.first().and_then(|budget| budget.budget_micros),
        spent_micros: spent.as_ref().map_or(Money::ZERO, |budget| budget.spent_micros),
        held_micros: spent.map_or(Money::ZERO, |budget| budget.held_micros),
    };
    std::iter::once(today).chain(others).collect()
}

/// Sets or removes a limit.
pub(crate) async fn set(
    connection: &mut DbConnection,
    owner: &BudgetOwner,
    limit: Option<Money>,
) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO budgets (owner, budget) VALUES ($1, $2)
         ON CONFLICT (owner) DO UPDATE SET budget = excluded.budget",
    )
    .bind(owner.key())
    .bind(limit.map(|limit| bigint(limit.micros())))
    .execute(connection)
    .await?;
    Ok(())
}

/// The rows of these keys that exist; at most six keys.
pub(crate) async fn load(
    connection: &mut DbConnection,
    keys: Vec<String>,
) -> Result<Vec<Account>, StoreError> {
    let mut query = sqlx::query(
        "SELECT owner, budget, spent, held, tokens FROM budgets
         WHERE owner IN ($1, $2, $3, $4, $5, $6)",
    );
    // No owner has an empty key.
    for key in keys.into_iter().chain(std::iter::repeat(String::new())).take(6) {
        query = query.bind(key);
    }
    query.fetch_all(connection).await?.iter().map(read).collect()
}

fn read(row: &DbRow) -> Result<Account, StoreError> {
    let key = row::text(row, "owner")?;
    let (scope, name) = key.split_once(':').unwrap_or((&key, ""));
    let money = |column| Ok::<_, StoreError>(Money::from_micros(row::count(row, column)?));
    let budget = Budget {
        scope: scope.parse().map_err(|_| StoreError::Corrupt { column: "owner" })?,
        name: name.to_owned(),
        budget_micros: row::count_optional(row, "budget")?.map(Money::from_micros),
        spent_micros: money("spent")?,
        held_micros: money("held")?,
    };
    Ok(Account { budget, tokens: row::count(row, "tokens")? })
}

/// Deletes the budget of a deleted session, and that of its root, once no session is below it.
pub(crate) async fn forget_session(
    connection: &mut DbConnection,
    session: &SessionId,
    root: Option<String>,
) -> Result<(), StoreError> {
    for id in std::iter::once(session.to_string()).chain(root) {
        sqlx::query(
            "DELETE FROM budgets WHERE owner = 'session:' || $1
             AND NOT EXISTS (SELECT 1 FROM sessions WHERE id = $1)
             AND NOT EXISTS (SELECT 1 FROM child_sessions WHERE root = $1)",
        )
        .bind(id)
        .execute(&mut *connection)
        .await?;
    }
    Ok(())
}

/// The root of a session that an agent created.
pub(crate) async fn root_of(
    connection: &mut DbConnection,
    session: &SessionId,
) -> Result<Option<String>, StoreError> {
    let found = sqlx::query("SELECT root FROM child_sessions WHERE session = $1")
        .bind(session.to_string())
        .fetch_optional(connection)
        .await?;
    found.map(|found| row::text(&found, "root")).transpose()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget(limit: Option<u64>, spent: u64, held: u64) -> Budget {
        Budget {
            scope: SpendingScope::User,
            name: "ada@example.org".to_owned(),
            budget_micros: limit.map(Money::from_micros),
            spent_micros: Money::from_micros(spent),
            held_micros: Money::from_micros(held),
        }
    }

    #[test]
    fn call_must_fit_into_every_budget() {
        let call = |micros| Some(Money::from_micros(micros));
        let rich = budget(Some(100), 0, 0);
        assert_eq!(judge(&[rich.clone(), budget(None, 500, 0)], call(100)), Ok(()));
        assert!(judge(std::slice::from_ref(&rich), call(101)).is_err());
        assert!(judge(&[rich.clone(), budget(Some(50), 20, 20)], call(11)).is_err());
        assert_eq!(judge(&[rich, budget(Some(50), 20, 20)], call(10)), Ok(()));
        assert_eq!(judge(&[budget(Some(5), 9, 0)], call(0)), Ok(()), "it costs nothing");
    }

    #[test]
    fn call_without_price_needs_no_limit() {
        assert_eq!(judge(&[budget(None, 0, 0)], None), Ok(()));
        let refused = judge(&[budget(Some(5), 0, 0)], None).unwrap_err();
        assert!(matches!(refused, OverBudget::Unpriced { .. }) && !refused.may_fit_later());
    }

    #[test]
    fn only_held_money_can_become_free() {
        let refused = |spent, held| {
            judge(&[budget(Some(10), spent, held)], Some(Money::from_micros(4))).unwrap_err()
        };
        assert!(refused(6, 1).may_fit_later());
        assert!(!refused(7, 0).may_fit_later());
    }

    #[test]
    fn day_is_the_date_in_utc() {
        assert_eq!(day(Timestamp::from_millis(1_763_196_705_123)), "2025-11-15");
    }
}

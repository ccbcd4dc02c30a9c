//! Network rules of sessions, of repositories and of the whole server.

use harvest_proto::{RepositoryName, RuleScope, RuleVerdict, SessionId, api::NetworkRule};

use crate::{DbConnection, DbRow, Store, StoreError, reserve::OnFullDisk, row, target::Target};

// Every connection is judged by all rules of its session.
const MAX_RULES: usize = 200;

const INSERT: &str =
    "INSERT INTO network_rules (session, repository, name, verdict, ports, private)
     VALUES ($1, $2, $3, $4, $5, $6)";

// `IS NOT DISTINCT FROM` is true for two nulls, on both databases.
const OF_OWNER: &str = "session IS NOT DISTINCT FROM $1 AND repository IS NOT DISTINCT FROM $2";

/// What a network rule belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RuleOwner {
    Session(SessionId),
    Repository(RepositoryName),
    Everywhere,
}

impl RuleOwner {
    #[must_use]
    pub const fn scope(&self) -> RuleScope {
        match self {
            Self::Session(_) => RuleScope::Session,
            Self::Repository(_) => RuleScope::Repository,
            Self::Everywhere => RuleScope::Everywhere,
        }
    }

    fn columns(&self) -> (Option<String>, Option<String>) {
        match self {
            Self::Session(session) => (Some(session.to_string()), None),
            Self::Repository(name) => (None, Some(name.to_string())),
            Self::Everywhere => (None, None),
        }
    }
}

impl Store {
    /// Adds a rule, or its ports to the owner's earlier one for the name with the same verdict.
    pub async fn network_rule_set(
        &self,
        owner: &RuleOwner,
        rule: &NetworkRule,
    ) -> Result<NetworkRule, StoreError> {
        let (owner, rule) = (owner.columns(), rule.clone());
        self.writer
            .run(move |connection| Box::pin(async move { set(connection, owner, rule).await }))
            .await
    }

    /// Removes the owner's rules for a name. Returns whether there was one.
    pub async fn network_rule_remove(
        &self,
        owner: &RuleOwner,
        name: &str,
    ) -> Result<bool, StoreError> {
        let (session, repository) = owner.columns();
        let name = name.to_owned();
        self.writer
            .run_on(OnFullDisk::UseReserve, move |connection| {
                Box::pin(async move {
                    Ok(delete(connection, &(session, repository), &name, None).await? > 0)
                })
            })
            .await
    }

    /// The rules that apply to an owner: its own, those of its repositories and those of the whole
    /// server.
    pub async fn network_rule_list(
        &self,
        owner: &RuleOwner,
    ) -> Result<Vec<NetworkRule>, StoreError> {
        let (session, repository) = owner.columns();
        let query = sqlx::query(
            "SELECT session, repository, name, verdict, ports, private FROM network_rules
             WHERE (session IS NULL AND repository IS NULL) OR session = $1 OR repository = $2
             OR repository IN (SELECT repository FROM checkouts WHERE session = $1)
             ORDER BY session, repository, name, verdict",
        )
        .bind(session)
        .bind(repository);
        self.all(query, read).await
    }
}

type OwnerColumns = (Option<String>, Option<String>);

async fn set(
    connection: &mut DbConnection,
    owner: OwnerColumns,
    mut rule: NetworkRule,
) -> Result<NetworkRule, StoreError> {
    let statement = format!(
        "SELECT session, repository, name, verdict, ports, private FROM network_rules
         WHERE {OF_OWNER}"
    );
    let rows = sqlx::query(sqlx::AssertSqlSafe(statement))
        .bind(owner.0.clone())
        .bind(owner.1.clone())
        .fetch_all(&mut *connection)
        .await?;
    let known = rows.iter().map(read).collect::<Result<Vec<_>, _>>()?;
    match known.iter().find(|one| one.name == rule.name && one.verdict == rule.verdict) {
        // No ports are all ports.
        Some(earlier) if earlier.ports.is_empty() || rule.ports.is_empty() => rule.ports.clear(),
        Some(earlier) => {
            rule.ports.extend(&earlier.ports);
            rule.ports.sort_unstable();
            rule.ports.dedup();
        }
        None if known.len() >= MAX_RULES => {
            let what = format!("there are {MAX_RULES} network rules already; remove one first");
            return Err(StoreError::TooLarge { what });
        }
        None => {}
    }
    delete(connection, &owner, &rule.name, Some(rule.verdict)).await?;
    let ports: Vec<String> = rule.ports.iter().map(u16::to_string).collect();
    sqlx::query(INSERT)
        .bind(owner.0)
        .bind(owner.1)
        .bind(rule.name.clone())
        .bind(rule.verdict.as_str())
        .bind(ports.join(","))
        .bind(i64::from(rule.private))
        .execute(connection)
        .await?;
    Ok(rule)
}

async fn delete(
    connection: &mut DbConnection,
    owner: &OwnerColumns,
    name: &str,
    verdict: Option<RuleVerdict>,
) -> Result<u64, StoreError> {
    let statement =
        format!("DELETE FROM network_rules WHERE {OF_OWNER} AND name = $3 AND verdict LIKE $4");
    let deleted = sqlx::query(sqlx::AssertSqlSafe(statement))
        .bind(owner.0.clone())
        .bind(owner.1.clone())
        .bind(name.to_owned())
        .bind(verdict.map_or("%", RuleVerdict::as_str))
        .execute(connection)
        .await?;
    Ok(deleted.rows_affected())
}

/// Adds a rule to a session in the same transaction as other writes.
pub(crate) async fn insert(target: &mut Target<'_>, rule: &NetworkRule) -> Result<(), StoreError> {
    let owner = (Some(target.session.to_string()), None);
    set(target.connection, owner, rule.clone()).await.map(drop)
}

/// Copies the rules of another session.
pub(crate) async fn copy(target: &mut Target<'_>, from: &SessionId) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO network_rules (session, repository, name, verdict, ports, private)
         SELECT $1, NULL, name, verdict, ports, private FROM network_rules WHERE session = $2",
    )
    .bind(target.session.to_string())
    .bind(from.to_string())
    .execute(&mut *target.connection)
    .await?;
    Ok(())
}

fn read(row: &DbRow) -> Result<NetworkRule, StoreError> {
    let scope = match (row::optional(row, "session")?, row::optional(row, "repository")?) {
        (Some(_), _) => RuleScope::Session,
        (None, Some(_)) => RuleScope::Repository,
        (None, None) => RuleScope::Everywhere,
    };
    let ports = row::text(row, "ports")?;
    let ports = ports.split(',').filter(|port| !port.is_empty()).map(str::parse);
    Ok(NetworkRule {
        name: row::text(row, "name")?,
        verdict: row::parsed(row, "verdict")?,
        ports: ports
            .collect::<Result<_, _>>()
            .map_err(|_| StoreError::Corrupt { column: "ports" })?,
        private: row::count::<i64>(row, "private")? != 0,
        scope,
    })
}

//! The memory of a repository: entities with observations, and relations between them. The changes
//! are those of the stock MCP memory server; unlike there, an entity and each of its observations
//! exist once even if one request repeats them. The size of a call is checked before its
//! transaction, because a transaction holds the only writer of the database.

mod call_size;

use std::collections::{HashMap, hash_map::Entry};

use harvest_proto::{
    RepositoryName,
    api::{MemoryEntity, MemoryGraph, MemoryRelation},
};

use self::call_size::CallSize;
use crate::{DbConnection, DbRow, Store, StoreError, job::JobFuture, reserve::OnFullDisk, row};

// PostgreSQL refuses an index entry of more than 2,704 bytes, and relations are indexed by three
// names and the repository's.
const MAX_NAME_BYTES: usize = 512;
const MAX_OBSERVATION_BYTES: usize = 8 * 1024;
/// The number of items, nested ones included, in one call of an agent.
pub const MAX_MEMORY_CALL_ITEMS: usize = 1000;
// A graph is read as a whole, by agents too, and fits into the body of one request.
const MAX_GRAPH_CHARACTERS: u64 = 256 * 1024;
// What a row adds to the characters of its texts when the graph is written as JSON.
const SIZE: &str = "SELECT CAST(COALESCE(SUM(size), 0) AS BIGINT) AS size FROM (
     SELECT LENGTH(name) + LENGTH(kind) + 50 AS size FROM memory_entities WHERE repository = $1
     UNION ALL SELECT LENGTH(text) + 3 FROM memory_observations WHERE repository = $1
     UNION ALL SELECT LENGTH(source) + LENGTH(target) + LENGTH(kind) + 50
     FROM memory_relations WHERE repository = $1) AS sizes";

/// Observations about one entity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryObservations {
    pub entity: String,
    pub contents: Vec<String>,
}

impl Store {
    /// The memory of a repository; empty for an unknown one.
    pub async fn memory_read(
        &self,
        repository: &RepositoryName,
    ) -> Result<MemoryGraph, StoreError> {
        // One statement reads one state of the three tables.
        let query = sqlx::query(
            "SELECT CAST(1 AS BIGINT) AS part, name AS a, kind AS b, '' AS c, position FROM memory_entities WHERE repository = $1
             UNION ALL SELECT CAST(2 AS BIGINT), entity, text, '', position FROM memory_observations WHERE repository = $1
             UNION ALL SELECT CAST(3 AS BIGINT), source, target, kind, position FROM memory_relations WHERE repository = $1
             ORDER BY 1, 5",
        )
        .bind(repository.to_string());
        let rows: Vec<(i64, [String; 3])> = self.all(query, read).await?;
        let mut graph = MemoryGraph::default();
        let mut index = HashMap::new();
        for (part, [a, b, c]) in rows {
            match part {
                1 => {
                    index.insert(a.clone(), graph.entities.len());
                    let entity = MemoryEntity { name: a, entity_type: b, observations: Vec::new() };
                    graph.entities.push(entity);
                }
                2 => {
                    let entity = index.get(&a).and_then(|at: &usize| graph.entities.get_mut(*at));
                    entity.into_iter().for_each(|entity| entity.observations.push(b.clone()));
                }
                _ => graph.relations.push(MemoryRelation { from: a, to: b, relation_type: c }),
            }
        }
        Ok(graph)
    }

    /// Whether the memory of a repository got its first entities, or a user took it over.
    pub async fn memory_seeded(&self, repository: &RepositoryName) -> Result<bool, StoreError> {
        let query = sqlx::query("SELECT memory_seeded FROM repositories WHERE name = $1")
            .bind(repository.to_string());
        let seeded: Vec<bool> =
            self.all(query, |row| Ok(row::count::<i64>(row, "memory_seeded")? != 0)).await?;
        Ok(seeded.into_iter().next().unwrap_or(true))
    }

    /// Adds the first entities and relations, once; what exists already stays as it is.
    pub async fn memory_seed(
        &self,
        repository: &RepositoryName,
        graph: MemoryGraph,
    ) -> Result<(), StoreError> {
        CallSize::default()
            .entities(&graph.entities)
            .relations(&graph.relations)
            .check_graph(repository.as_ref())?;
        self.memory_change(repository, OnFullDisk::Refuse, |mut memory| {
            Box::pin(async move {
                if !memory.mark_seeded().await? {
                    return Ok(());
                }
                let mut last = memory.last_position("memory_entities").await?;
                for entity in &graph.entities {
                    memory.create_entity(entity, &mut last).await?;
                }
                memory.create_relations(graph.relations).await?;
                memory.check_size().await
            })
        })
        .await
    }

    /// Replaces the memory of a repository. Entities of the same name are merged.
    pub async fn memory_replace(
        &self,
        repository: &RepositoryName,
        graph: MemoryGraph,
    ) -> Result<(), StoreError> {
        CallSize::default()
            .entities(&graph.entities)
            .relations(&graph.relations)
            .check_graph(repository.as_ref())?;
        self.memory_change(repository, OnFullDisk::Refuse, |mut memory| {
            Box::pin(async move {
                memory.clear().await?;
                memory.mark_seeded().await?;
                let mut last = 0;
                for entity in &graph.entities {
                    if memory.create_entity(entity, &mut last).await?.is_none() {
                        memory.observe(&name(&entity.name)?, &entity.observations).await?;
                    }
                }
                memory.create_relations(graph.relations).await?;
                memory.check_size().await
            })
        })
        .await
    }

    /// Deletes the memory of a repository. It is not seeded again.
    pub async fn memory_clear(&self, repository: &RepositoryName) -> Result<(), StoreError> {
        self.memory_change(repository, OnFullDisk::UseReserve, |mut memory| {
            Box::pin(async move {
                memory.clear().await?;
                memory.mark_seeded().await.map(drop)
            })
        })
        .await
    }

    /// Creates the entities whose names are new, and returns them.
    pub async fn memory_create_entities(
        &self,
        repository: &RepositoryName,
        entities: Vec<MemoryEntity>,
    ) -> Result<Vec<MemoryEntity>, StoreError> {
        CallSize::default().entities(&entities).check_call()?;
        self.memory_change(repository, OnFullDisk::Refuse, |mut memory| {
            Box::pin(async move {
                let mut created = Vec::new();
                let mut last = memory.last_position("memory_entities").await?;
                for entity in &entities {
                    created.extend(memory.create_entity(entity, &mut last).await?);
                }
                memory.check_size().await?;
                Ok(created)
            })
        })
        .await
    }

    /// Creates the relations that do not exist yet, and returns them.
    pub async fn memory_create_relations(
        &self,
        repository: &RepositoryName,
        relations: Vec<MemoryRelation>,
    ) -> Result<Vec<MemoryRelation>, StoreError> {
        CallSize::default().relations(&relations).check_call()?;
        self.memory_change(repository, OnFullDisk::Refuse, |mut memory| {
            Box::pin(async move {
                let created = memory.create_relations(relations).await?;
                memory.check_size().await?;
                Ok(created)
            })
        })
        .await
    }

    /// Adds observations to existing entities; returns those that are new. All or none are added.
    pub async fn memory_add_observations(
        &self,
        repository: &RepositoryName,
        observations: Vec<MemoryObservations>,
    ) -> Result<Vec<MemoryObservations>, StoreError> {
        CallSize::default().observations(&observations).check_call()?;
        self.memory_change(repository, OnFullDisk::Refuse, |mut memory| {
            Box::pin(async move {
                let mut added = Vec::new();
                for MemoryObservations { entity, contents } in observations {
                    let entity = name(&entity)?;
                    if !memory.has_entity(&entity).await? {
                        return Err(StoreError::missing(format!("entity `{entity}`")));
                    }
                    let contents = memory.observe(&entity, &contents).await?;
                    added.push(MemoryObservations { entity, contents });
                }
                memory.check_size().await?;
                Ok(added)
            })
        })
        .await
    }

    /// Deletes entities, and the relations from and to these names.
    pub async fn memory_delete_entities(
        &self,
        repository: &RepositoryName,
        names: Vec<String>,
    ) -> Result<(), StoreError> {
        CallSize::default().texts(&names).check_call()?;
        self.memory_change(repository, OnFullDisk::Try, |mut memory| {
            Box::pin(async move {
                for name in names {
                    memory
                        .execute(
                            "DELETE FROM memory_entities WHERE repository = $1 AND name = $2",
                            [&name],
                        )
                        .await?;
                    memory
                        .execute(
                            "DELETE FROM memory_relations WHERE repository = $1 AND (source = $2 OR target = $2)",
                            [&name],
                        )
                        .await?;
                }
                Ok(())
            })
        })
        .await
    }

    /// Deletes observations; unknown ones are ignored.
    pub async fn memory_delete_observations(
        &self,
        repository: &RepositoryName,
        observations: Vec<MemoryObservations>,
    ) -> Result<(), StoreError> {
        CallSize::default().observations(&observations).check_call()?;
        self.memory_change(repository, OnFullDisk::Try, |mut memory| {
            Box::pin(async move {
                for MemoryObservations { entity, contents } in observations {
                    memory.forget(&row::replace_nul(entity), contents).await?;
                }
                Ok(())
            })
        })
        .await
    }

    /// Deletes relations; unknown ones are ignored.
    pub async fn memory_delete_relations(
        &self,
        repository: &RepositoryName,
        relations: Vec<MemoryRelation>,
    ) -> Result<(), StoreError> {
        CallSize::default().relations(&relations).check_call()?;
        self.memory_change(repository, OnFullDisk::Try, |mut memory| {
            Box::pin(async move {
                for MemoryRelation { from, to, relation_type } in relations {
                    memory
                        .execute(
                            "DELETE FROM memory_relations WHERE repository = $1 AND source = $2 AND target = $3 AND kind = $4",
                            [&from, &to, &relation_type],
                        )
                        .await?;
                }
                Ok(())
            })
        })
        .await
    }

    /// Runs one change in the next transaction, if the repository exists.
    async fn memory_change<T, F>(
        &self,
        repository: &RepositoryName,
        on_full_disk: OnFullDisk,
        change: F,
    ) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: for<'c> FnOnce(MemoryWriter<'c>) -> JobFuture<'c, T> + Send + 'static,
    {
        let repository = repository.to_string();
        self.writer
            .run_on(on_full_disk, move |connection| {
                Box::pin(async move {
                    let known = sqlx::query("SELECT name FROM repositories WHERE name = $1")
                        .bind(repository.clone())
                        .fetch_optional(&mut *connection)
                        .await?;
                    if known.is_none() {
                        return Err(StoreError::missing(format!("repository `{repository}`")));
                    }
                    let observed = HashMap::new();
                    change(MemoryWriter { connection, repository, observed }).await
                })
            })
            .await
    }
}

/// The memory of one repository inside a transaction.
struct MemoryWriter<'c> {
    connection: &'c mut DbConnection,
    repository: String,
    /// The observations of the entities that this change has read, so that it reads them once.
    observed: HashMap<String, Observed>,
}

/// The observations about one entity.
#[derive(Default)]
struct Observed {
    positions: HashMap<String, i64>,
    last: i64,
}

impl MemoryWriter<'_> {
    /// Runs a statement whose first value is the repository; returns the number of changed rows.
    async fn execute<const N: usize>(
        &mut self,
        sql: &'static str,
        values: [&str; N],
    ) -> Result<u64, StoreError> {
        let query = sqlx::query(sql).bind(self.repository.clone());
        let query = values
            .into_iter()
            .fold(query, |query, value| query.bind(row::replace_nul(value.to_owned())));
        Ok(query.execute(&mut *self.connection).await?.rows_affected())
    }

    async fn clear(&mut self) -> Result<(), StoreError> {
        self.execute("DELETE FROM memory_entities WHERE repository = $1", []).await?;
        self.execute("DELETE FROM memory_relations WHERE repository = $1", []).await?;
        Ok(())
    }

    /// True the first time.
    async fn mark_seeded(&mut self) -> Result<bool, StoreError> {
        let sql = "UPDATE repositories SET memory_seeded = 1 WHERE name = $1 AND memory_seeded = 0";
        Ok(self.execute(sql, []).await? == 1)
    }

    async fn last_position(&mut self, table: &'static str) -> Result<i64, StoreError> {
        let sql = format!(
            "SELECT COALESCE(MAX(position), 0) AS position FROM {table} WHERE repository = $1"
        );
        let query = sqlx::query(sqlx::AssertSqlSafe(sql)).bind(self.repository.clone());
        row::count(&query.fetch_one(&mut *self.connection).await?, "position")
    }

    async fn has_entity(&mut self, entity: &str) -> Result<bool, StoreError> {
        let found =
            sqlx::query("SELECT name FROM memory_entities WHERE repository = $1 AND name = $2")
                .bind(self.repository.clone())
                .bind(entity.to_owned())
                .fetch_optional(&mut *self.connection)
                .await?;
        Ok(found.is_some())
    }

    /// Creates an entity after the last position, unless there is one of this name.
    async fn create_entity(
        &mut self,
        entity: &MemoryEntity,
        last: &mut i64,
    ) -> Result<Option<MemoryEntity>, StoreError> {
        let (name, kind) = (name(&entity.name)?, name(&entity.entity_type)?);
        let created = sqlx::query(
            "INSERT INTO memory_entities (repository, name, kind, position) VALUES ($1, $2, $3, $4)
             ON CONFLICT (repository, name) DO NOTHING",
        )
        .bind(self.repository.clone())
        .bind(name.clone())
        .bind(kind.clone())
        .bind(*last + 1)
        .execute(&mut *self.connection)
        .await?;
        if created.rows_affected() == 0 {
            return Ok(None);
        }
        *last += 1;
        self.observed.insert(name.clone(), Observed::default());
        let observations = self.observe(&name, &entity.observations).await?;
        Ok(Some(MemoryEntity { name, entity_type: kind, observations }))
    }

    async fn create_relations(
        &mut self,
        relations: Vec<MemoryRelation>,
    ) -> Result<Vec<MemoryRelation>, StoreError> {
        let mut new = Vec::new();
        let mut last = self.last_position("memory_relations").await?;
        for MemoryRelation { from, to, relation_type } in relations {
            let (from, to, relation_type) = (name(&from)?, name(&to)?, name(&relation_type)?);
            let created = sqlx::query(
                "INSERT INTO memory_relations (repository, source, target, kind, position)
                 VALUES ($1, $2, $3, $4, $5)
                 ON CONFLICT (repository, source, target, kind) DO NOTHING",
            )
            .bind(self.repository.clone())
            .bind(from.clone())
            .bind(to.clone())
            .bind(relation_type.clone())
            .bind(last + 1)
            .execute(&mut *self.connection)
            .await?;
            if created.rows_affected() > 0 {
                last += 1;
                new.push(MemoryRelation { from, to, relation_type });
            }
        }
        Ok(new)
    }

    /// Adds the observations that an entity does not have yet, and returns them.
    async fn observe(
        &mut self,
        entity: &str,
        contents: &[String],
    ) -> Result<Vec<String>, StoreError> {
        self.read_observations(entity).await?;
        let observed = self.observed.entry(entity.to_owned()).or_default();
        let mut added = Vec::new();
        for text in contents {
            let text = bounded("an observation", text, MAX_OBSERVATION_BYTES)?;
            let Entry::Vacant(new) = observed.positions.entry(text.clone()) else { continue };
            observed.last += 1;
            new.insert(observed.last);
            sqlx::query(
                "INSERT INTO memory_observations (repository, entity, position, text) VALUES ($1, $2, $3, $4)",
            )
            .bind(self.repository.clone())
            .bind(entity.to_owned())
            .bind(observed.last)
            .bind(text.clone())
            .execute(&mut *self.connection)
            .await?;
            added.push(text);
        }
        Ok(added)
    }

    /// Deletes observations about an entity by their positions, which are indexed.
    async fn forget(&mut self, entity: &str, contents: Vec<String>) -> Result<(), StoreError> {
        self.read_observations(entity).await?;
        let observed = self.observed.entry(entity.to_owned()).or_default();
        for text in contents {
            let Some(position) = observed.positions.remove(&row::replace_nul(text)) else {
                continue;
            };
            sqlx::query(
                "DELETE FROM memory_observations WHERE repository = $1 AND entity = $2 AND position = $3",
            )
            .bind(self.repository.clone())
            .bind(entity.to_owned())
            .bind(position)
            .execute(&mut *self.connection)
            .await?;
        }
        Ok(())
    }

    /// Reads the observations about an entity, unless this change has done so.
    async fn read_observations(&mut self, entity: &str) -> Result<(), StoreError> {
        if self.observed.contains_key(entity) {
            return Ok(());
        }
        let rows = sqlx::query(
            "SELECT text, position FROM memory_observations WHERE repository = $1 AND entity = $2",
        )
        .bind(self.repository.clone())
        .bind(entity.to_owned())
        .fetch_all(&mut *self.connection)
        .await?;
        let mut observed = Observed::default();
        for row in &rows {
            let position = row::count(row, "position")?;
            observed.last = observed.last.max(position);
            observed.positions.insert(row::text(row, "text")?, position);
        }
        self.observed.insert(entity.to_owned(), observed);
        Ok(())
    }

    /// Refuses a change that made the graph too large.
    async fn check_size(&mut self) -> Result<(), StoreError> {
        let query = sqlx::query(SIZE).bind(self.repository.clone());
        let size: u64 = row::count(&query.fetch_one(&mut *self.connection).await?, "size")?;
        call_size::check_graph(&self.repository, size)
    }
}

/// A name or type within its limit.
fn name(text: &str) -> Result<String, StoreError> {
    bounded("a name or type in memory", text, MAX_NAME_BYTES)
}

fn bounded(what: &str, text: &str, max: usize) -> Result<String, StoreError> {
    let text = row::replace_nul(text.to_owned());
    match text.len() <= max {
        true => Ok(text),
        false => Err(StoreError::TooLarge { what: format!("{what} has at most {max} bytes") }),
    }
}

fn read(row: &DbRow) -> Result<(i64, [String; 3]), StoreError> {
    let texts = [row::text(row, "a")?, row::text(row, "b")?, row::text(row, "c")?];
    Ok((row::count(row, "part")?, texts))
}

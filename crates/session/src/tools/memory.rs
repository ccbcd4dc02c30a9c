//! The nine tools of the stock MCP memory server, on the memory of the session's repository, which
//! all its sessions share. Names, arguments and results are those of the stock server.

use std::collections::HashSet;

use harvest_gateway::ledger::ToolResult;
use harvest_proto::{
    RepositoryName,
    api::{MemoryEntity, MemoryGraph, MemoryRelation},
};
use harvest_store::{MAX_MEMORY_CALL_ITEMS, MemoryObservations};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{
    SessionTools, ToolError, arguments,
    definition::{Definition, Effect, objects, text, texts},
    document,
};

pub(super) const DEFINITIONS: [Definition; 9] = [
    Definition {
        name: "create_entities",
        description: "Remember new entities about this repository, for this and later sessions",
        effect: Effect::Adds,
        arguments: &[("entities", entities)],
        optional: &[],
    },
    Definition {
        name: "create_relations",
        description: "Remember new relations between entities. Relations are in active voice",
        effect: Effect::Adds,
        arguments: &[("relations", relations)],
        optional: &[],
    },
    Definition {
        name: "add_observations",
        description: "Add new observations to remembered entities",
        effect: Effect::Adds,
        arguments: &[("observations", || observations("contents"))],
        optional: &[],
    },
    Definition {
        name: "delete_entities",
        description: "Forget entities and their relations",
        effect: Effect::Deletes,
        arguments: &[("entityNames", || texts("The names of the entities to delete"))],
        optional: &[],
    },
    Definition {
        name: "delete_observations",
        description: "Forget observations about entities",
        effect: Effect::Deletes,
        arguments: &[("deletions", || observations("observations"))],
        optional: &[],
    },
    Definition {
        name: "delete_relations",
        description: "Forget relations",
        effect: Effect::Deletes,
        arguments: &[("relations", relations)],
        optional: &[],
    },
    Definition {
        name: "read_graph",
        description: "Read everything that is remembered about this repository",
        effect: Effect::Reads,
        arguments: &[],
        optional: &[],
    },
    Definition {
        name: "search_nodes",
        description: "Search what is remembered about this repository",
        effect: Effect::Reads,
        arguments: &[("query", || {
            text("What names, types or observations of entities contain, in any case")
        })],
        optional: &[],
    },
    Definition {
        name: "open_nodes",
        description: "Read entities by their names, with their relations",
        effect: Effect::Reads,
        arguments: &[("names", || texts("The names of the entities to read"))],
        optional: &[],
    },
];

fn entities() -> Value {
    objects(&[
        ("name", text("The name of the entity")),
        ("entityType", text("The type of the entity")),
        ("observations", texts("What is known about the entity")),
    ])
}

fn relations() -> Value {
    objects(&[
        ("from", text("The name of the entity where the relation starts")),
        ("to", text("The name of the entity where the relation ends")),
        ("relationType", text("The type of the relation")),
    ])
}

fn observations(field: &str) -> Value {
    objects(&[("entityName", text("The name of the entity")), (field, texts("The observations"))])
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct AboutEntity {
    entity_name: String,
    #[serde(alias = "observations")]
    contents: Vec<String>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Added {
    entity_name: String,
    added_observations: Vec<String>,
}

impl From<AboutEntity> for MemoryObservations {
    fn from(about: AboutEntity) -> Self {
        Self { entity: about.entity_name, contents: about.contents }
    }
}

/// Calls a tool of this file; `None` when it is none.
pub(super) async fn call(
    tools: &SessionTools,
    name: &str,
    given: Value,
) -> Option<Result<ToolResult, ToolError>> {
    DEFINITIONS.iter().any(|definition| definition.name == name).then_some(())?;
    Some(match repository(tools).await {
        Ok(repository) => run(tools, &repository, name, given).await,
        Err(error) => Err(error),
    })
}

/// The repository whose memory a session uses: its first.
async fn repository(tools: &SessionTools) -> Result<RepositoryName, ToolError> {
    let record = tools.shared.store.session_get(&tools.session).await?;
    let first = record.checkouts.into_iter().next().map(|checkout| checkout.repository);
    let none = "this session has no repository, so nothing can be remembered";
    first.ok_or_else(|| ToolError::Refused(none.to_owned()))
}

async fn run(
    tools: &SessionTools,
    repository: &RepositoryName,
    name: &str,
    given: Value,
) -> Result<ToolResult, ToolError> {
    #[derive(Deserialize)]
    struct Entities {
        entities: Vec<MemoryEntity>,
    }
    #[derive(Deserialize)]
    struct Relations {
        relations: Vec<MemoryRelation>,
    }
    #[derive(Deserialize)]
    struct Observations {
        #[serde(alias = "deletions")]
        observations: Vec<AboutEntity>,
    }
    #[derive(Deserialize)]
    struct Names {
        #[serde(alias = "entityNames")]
        names: Vec<String>,
    }
    #[derive(Deserialize)]
    struct Search {
        query: String,
    }
    let store = &tools.shared.store;
    let observations = |given| -> Result<Vec<MemoryObservations>, ToolError> {
        let Observations { observations } = arguments(given)?;
        Ok(observations.into_iter().map(Into::into).collect())
    };
    Ok(match name {
        "create_entities" => {
            let Entities { entities } = arguments(given)?;
            let created = store.memory_create_entities(repository, entities).await?;
            document(&created, json!({ "entities": created }))
        }
        "create_relations" => {
            let Relations { relations } = arguments(given)?;
            let created = store.memory_create_relations(repository, relations).await?;
            document(&created, json!({ "relations": created }))
        }
        "add_observations" => {
            let added = store.memory_add_observations(repository, observations(given)?).await?;
            let results: Vec<Added> = added
                .into_iter()
                .map(|one| Added { entity_name: one.entity, added_observations: one.contents })
                .collect();
            document(&results, json!({ "results": results }))
        }
        "delete_entities" => {
            let Names { names } = arguments(given)?;
            store.memory_delete_entities(repository, names).await?;
            deleted("Entities")
        }
        "delete_observations" => {
            store.memory_delete_observations(repository, observations(given)?).await?;
            deleted("Observations")
        }
        "delete_relations" => {
            let Relations { relations } = arguments(given)?;
            store.memory_delete_relations(repository, relations).await?;
            deleted("Relations")
        }
        "search_nodes" => {
            let Search { query } = arguments(given)?;
            found(&search(store.memory_read(repository).await?, &query))
        }
        "open_nodes" => {
            let Names { names } = arguments(given)?;
            let names = distinct(names)?;
            let graph = store.memory_read(repository).await?;
            found(&select(graph, |entity| names.contains(&entity.name)))
        }
        _ => found(&store.memory_read(repository).await?),
    })
}

fn deleted(what: &str) -> ToolResult {
    let text = format!("{what} deleted successfully");
    let structured = json!({ "success": true, "message": text });
    ToolResult { text, structured: Some(structured), failed: false }
}

fn found(graph: &MemoryGraph) -> ToolResult {
    document(&graph, json!(graph))
}

/// The names of a call that reads, which has the same limit as one that writes.
fn distinct(names: Vec<String>) -> Result<HashSet<String>, ToolError> {
    if names.len() > MAX_MEMORY_CALL_ITEMS {
        let why = format!(
            "the call has {} items of at most {MAX_MEMORY_CALL_ITEMS}; split it into several calls",
            names.len()
        );
        return Err(ToolError::Refused(why));
    }
    Ok(names.into_iter().collect())
}

/// The entities whose name, type or observations contain the query, in any case.
fn search(graph: MemoryGraph, query: &str) -> MemoryGraph {
    let query = query.to_lowercase();
    let matches = |text: &String| text.to_lowercase().contains(&query);
    select(graph, |entity| {
        matches(&entity.name)
            || matches(&entity.entity_type)
            || entity.observations.iter().any(matches)
    })
}

/// Some entities, and the relations that begin or end at one of them.
fn select(mut graph: MemoryGraph, wanted: impl Fn(&MemoryEntity) -> bool) -> MemoryGraph {
    graph.entities.retain(wanted);
    let names: HashSet<&str> = graph.entities.iter().map(|entity| entity.name.as_str()).collect();
    let has = |name: &str| names.contains(name);
    graph.relations.retain(|relation| has(&relation.from) || has(&relation.to));
    graph
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graph() -> MemoryGraph {
        let entity = |name: &str, text: &str| MemoryEntity {
            name: name.into(),
            entity_type: "Service".into(),
            observations: vec![text.into()],
        };
        let relation = |from: &str, to: &str| MemoryRelation {
            from: from.into(),
            to: to.into(),
            relation_type: "uses".into(),
        };
        MemoryGraph {
            entities: vec![entity("api", "Listens on ÄÖ"), entity("db", "stores 100%")],
            relations: vec![relation("api", "db"), relation("db", "disk"), relation("x", "y")],
        }
    }

    fn names(graph: &MemoryGraph) -> Vec<&str> {
        graph.entities.iter().map(|entity| entity.name.as_str()).collect()
    }

    #[test]
    fn search_ignores_case_and_keeps_touching_relations() {
        let found = search(graph(), "äö");
        assert_eq!((names(&found), found.relations.len()), (vec!["api"], 1));
        assert_eq!(names(&search(graph(), "SERVICE")), ["api", "db"]);
        assert_eq!(names(&search(graph(), "0%")), ["db"]);
        assert_eq!(search(graph(), "none"), MemoryGraph::default());
    }

    #[test]
    fn opened_nodes_keep_relations_to_other_nodes() {
        let opened = select(graph(), |entity| entity.name == "db");
        assert_eq!((names(&opened), opened.relations.len()), (vec!["db"], 2));
    }

    #[test]
    fn too_many_names_are_not_opened() {
        let names = |count: usize| (0..count).map(|number| number.to_string()).collect();
        assert_eq!(distinct(names(1000)).unwrap().len(), 1000);
        let refused = distinct(names(1001)).unwrap_err().to_string();
        assert_eq!(refused, "the call has 1001 items of at most 1000; split it into several calls");
    }

    #[test]
    fn definitions_require_their_arguments() {
        let listed = DEFINITIONS[4].to_json();
        assert_eq!(listed["inputSchema"]["required"], json!(["deletions"]));
        let item = &listed["inputSchema"]["properties"]["deletions"]["items"];
        assert_eq!(item["required"], json!(["entityName", "observations"]));
        assert_eq!(listed["annotations"]["destructiveHint"], true);
    }
}

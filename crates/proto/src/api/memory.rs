//! The memory of a repository: a knowledge graph with the fields, and the file format, of the stock
//! MCP memory server.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

/// What the agents of a repository's sessions remembered.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MemoryGraph {
    /// The entities, oldest first. Names are unique.
    pub entities: Vec<MemoryEntity>,
    /// The relations, oldest first.
    pub relations: Vec<MemoryRelation>,
}

/// A thing that is remembered, with what was observed about it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MemoryEntity {
    /// Name of the entity.
    pub name: String,
    /// Type of the entity, such as `person` or `service`.
    pub entity_type: String,
    /// What was observed about the entity, oldest first, each once.
    pub observations: Vec<String>,
}

/// A directed relation between two entities, which need not exist.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MemoryRelation {
    /// Name of the entity where the relation starts.
    pub from: String,
    /// Name of the entity where the relation ends.
    pub to: String,
    /// Type of the relation, in active voice, such as `depends on`.
    pub relation_type: String,
}

/// One line of the stock server's file. It skips lines of other types, and so do we.
#[derive(Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum MemoryLine {
    Entity(MemoryEntity),
    Relation(MemoryRelation),
    #[serde(other, skip_serializing)]
    Other,
}

/// A line of a memory file that cannot be read.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {number} is not an entity or a relation: {reason}")]
pub struct MemoryFileError {
    number: usize,
    reason: String,
}

impl MemoryGraph {
    /// The graph as the stock server's file: one JSON object per line.
    #[must_use]
    pub fn to_jsonl(&self) -> String {
        let entities = self.entities.iter().cloned().map(MemoryLine::Entity);
        let relations = self.relations.iter().cloned().map(MemoryLine::Relation);
        let mut text = String::new();
        for line in entities.chain(relations) {
            let line = serde_json::to_string(&line).expect("all keys are strings");
            let _ = writeln!(text, "{line}");
        }
        text
    }

    /// Reads the stock server's file.
    ///
    /// # Errors
    /// When a line is no JSON object, or lacks a field of its type.
    pub fn from_jsonl(text: &str) -> Result<Self, MemoryFileError> {
        let mut graph = Self::default();
        for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty()) {
            let unreadable = |error: serde_json::Error| {
                let reason = error.to_string();
                MemoryFileError { number, reason }
            };
            match serde_json::from_str(line).map_err(unreadable)? {
                MemoryLine::Entity(entity) => graph.entities.push(entity),
                MemoryLine::Relation(relation) => graph.relations.push(relation),
                MemoryLine::Other => {}
            }
        }
        Ok(graph)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_format_is_that_of_stock_server() {
        let text = "{\"type\":\"entity\",\"name\":\"api\",\"entityType\":\"service\",\
                    \"observations\":[\"port 80\"]}\n\
                    {\"type\":\"relation\",\"from\":\"api\",\"to\":\"db\",\"relationType\":\"uses\"}\n";
        let graph = MemoryGraph::from_jsonl(text).unwrap();
        assert_eq!(graph.entities[0].observations, ["port 80"]);
        assert_eq!(graph.to_jsonl(), text);
    }

    #[test]
    fn unknown_types_are_skipped_broken_lines_reported() {
        let text = "\n{\"type\":\"note\",\"text\":\"x\"}\n";
        assert_eq!(MemoryGraph::from_jsonl(text), Ok(MemoryGraph::default()));
        let broken = MemoryGraph::from_jsonl("\n{\"type\":\"entity\",\"name\":\"a\"}\n");
        assert!(broken.unwrap_err().to_string().starts_with("line 2 is not"));
    }
}

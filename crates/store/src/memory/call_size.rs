//! The size of a call that changes the memory of a repository.

use harvest_proto::api::{MemoryEntity, MemoryRelation};

use super::{MAX_GRAPH_CHARACTERS, MAX_MEMORY_CALL_ITEMS, MemoryObservations};
use crate::StoreError;

// What an object and a text add to their characters when the graph is written as JSON; as in the
// statement that measures a stored graph.
const OBJECT: u64 = 50;
const TEXT: u64 = 3;

/// The items of a call, nested ones included, and their characters as JSON.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct CallSize {
    items: usize,
    characters: u64,
}

impl CallSize {
    pub(super) fn entities(self, entities: &[MemoryEntity]) -> Self {
        entities.iter().fold(self, |size, one| {
            size.item(OBJECT, &[&one.name, &one.entity_type]).texts(&one.observations)
        })
    }

    pub(super) fn relations(self, relations: &[MemoryRelation]) -> Self {
        relations
            .iter()
            .fold(self, |size, one| size.item(OBJECT, &[&one.from, &one.to, &one.relation_type]))
    }

    pub(super) fn observations(self, observations: &[MemoryObservations]) -> Self {
        observations
            .iter()
            .fold(self, |size, one| size.item(OBJECT, &[&one.entity]).texts(&one.contents))
    }

    pub(super) fn texts(self, texts: &[String]) -> Self {
        texts.iter().fold(self, |size, text| size.item(TEXT, &[text]))
    }

    fn item(self, overhead: u64, texts: &[&str]) -> Self {
        let characters: usize = texts.iter().map(|text| text.chars().count()).sum();
        let characters = u64::try_from(characters).unwrap_or(u64::MAX);
        Self {
            items: self.items + 1,
            characters: self.characters.saturating_add(overhead).saturating_add(characters),
        }
    }

    /// Refuses a call that would hold the writer of the database for long.
    pub(super) fn check_call(self) -> Result<(), StoreError> {
        let (size, max) = if self.items > MAX_MEMORY_CALL_ITEMS {
            (format!("{} items", self.items), format!("{MAX_MEMORY_CALL_ITEMS}"))
        } else if self.characters > MAX_GRAPH_CHARACTERS {
            (format!("{} characters", self.characters), format!("{MAX_GRAPH_CHARACTERS}"))
        } else {
            return Ok(());
        };
        let what = format!("the call has {size} of at most {max}; split it into several calls");
        Err(StoreError::TooLarge { what })
    }

    /// Refuses a graph that is too large to be stored.
    pub(super) fn check_graph(self, repository: &str) -> Result<(), StoreError> {
        check_graph(repository, self.characters)
    }
}

pub(super) fn check_graph(repository: &str, characters: u64) -> Result<(), StoreError> {
    if characters <= MAX_GRAPH_CHARACTERS {
        return Ok(());
    }
    let what = format!(
        "the memory of `{repository}` would exceed {MAX_GRAPH_CHARACTERS} characters; delete \
         entities or observations that are no longer needed"
    );
    Err(StoreError::TooLarge { what })
}

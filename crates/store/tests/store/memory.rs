//! The memory of repositories: the stock server's operations, limits, concurrent writers.

use harvest_proto::{
    RepositoryName, Timestamp,
    api::{MemoryEntity, MemoryGraph, MemoryRelation, Repository},
};
use harvest_store::{MemoryObservations, StoreError};
use proptest::{
    prelude::*,
    strategy::ValueTree,
    test_runner::{Config, TestRunner},
};

use crate::test_store::{NOW, TestStore, on_both};

on_both! {
    random_operations_match_a_plain_model,
    concurrent_writers_lose_nothing,
    memory_is_separate_and_deleted_with_its_repository,
    replacing_merges_entities_of_one_name,
    failed_operation_changes_nothing,
    names_and_graphs_have_a_limit,
    too_large_calls_change_nothing,
    repeated_observations_keep_their_order,
    seed_applies_once_and_never_after_clear,
}

/// The operations of the stock server that change the graph.
#[derive(Debug, Clone)]
enum Operation {
    CreateEntities(Vec<MemoryEntity>),
    CreateRelations(Vec<MemoryRelation>),
    AddObservations(Vec<MemoryObservations>),
    DeleteEntities(Vec<String>),
    DeleteObservations(Vec<MemoryObservations>),
    DeleteRelations(Vec<MemoryRelation>),
}

/// The graph as plain lists, changed as the stock server does.
#[derive(Debug, Clone, Default)]
struct Model(MemoryGraph);

impl Model {
    fn entity(&mut self, name: &str) -> Option<&mut MemoryEntity> {
        self.0.entities.iter_mut().find(|entity| entity.name == name)
    }

    fn apply(&mut self, operation: &Operation) -> bool {
        match operation {
            Operation::CreateEntities(entities) => {
                for entity in entities {
                    if self.entity(&entity.name).is_none() {
                        let mut entity = entity.clone();
                        let mut seen = std::collections::HashSet::new();
                        entity.observations.retain(|text| seen.insert(text.clone()));
                        self.0.entities.push(entity);
                    }
                }
            }
            Operation::CreateRelations(relations) => {
                for relation in relations {
                    if !self.0.relations.contains(relation) {
                        self.0.relations.push(relation.clone());
                    }
                }
            }
            Operation::AddObservations(all) => {
                let before = self.clone();
                for MemoryObservations { entity, contents } in all {
                    let Some(entity) = self.entity(entity) else {
                        *self = before;
                        return false;
                    };
                    for text in contents {
                        if !entity.observations.contains(text) {
                            entity.observations.push(text.clone());
                        }
                    }
                }
            }
            Operation::DeleteEntities(names) => {
                self.0.entities.retain(|entity| !names.contains(&entity.name));
                let touched =
                    |one: &MemoryRelation| names.contains(&one.from) || names.contains(&one.to);
                self.0.relations.retain(|relation| !touched(relation));
            }
            Operation::DeleteObservations(all) => {
                for MemoryObservations { entity, contents } in all {
                    if let Some(entity) = self.entity(entity) {
                        entity.observations.retain(|text| !contents.contains(text));
                    }
                }
            }
            Operation::DeleteRelations(relations) => {
                self.0.relations.retain(|relation| !relations.contains(relation));
            }
        }
        true
    }
}

fn operation() -> impl Strategy<Value = Operation> {
    // Few names and texts, so that operations meet; some are special in SQL, JSON or LIKE.
    let text =
        || prop::sample::select(vec!["a", "A", "é%", "o'x\n", "_", ""]).prop_map(str::to_owned);
    let texts = move || prop::collection::vec(text(), 0..4);
    let entity = (text(), text(), texts()).prop_map(|(name, entity_type, observations)| {
        MemoryEntity { name, entity_type, observations }
    });
    let relation = move || {
        (text(), text(), text()).prop_map(|(from, to, relation_type)| MemoryRelation {
            from,
            to,
            relation_type,
        })
    };
    let observations = move || {
        let one = (text(), texts())
            .prop_map(|(entity, contents)| MemoryObservations { entity, contents });
        prop::collection::vec(one, 0..3)
    };
    prop_oneof![
        3 => prop::collection::vec(entity, 0..4).prop_map(Operation::CreateEntities),
        2 => prop::collection::vec(relation(), 0..4).prop_map(Operation::CreateRelations),
        3 => observations().prop_map(Operation::AddObservations),
        1 => prop::collection::vec(text(), 0..2).prop_map(Operation::DeleteEntities),
        1 => observations().prop_map(Operation::DeleteObservations),
        1 => prop::collection::vec(relation(), 0..2).prop_map(Operation::DeleteRelations),
    ]
}

impl TestStore {
    async fn repository(&self, name: &str) -> RepositoryName {
        let name = RepositoryName::new("local", name).unwrap();
        let repository = Repository {
            name: name.clone(),
            url: format!("https://git.example.org/{name}"),
            base: None,
            secret: None,
            image: None,
            build: None,
            created_at: Timestamp::from_millis(1),
        };
        self.store.repository_insert(&repository).await.unwrap();
        name
    }

    async fn operate(&self, name: &RepositoryName, operation: Operation) -> Result<(), StoreError> {
        let store = &self.store;
        match operation {
            Operation::CreateEntities(all) => {
                store.memory_create_entities(name, all).await.map(drop)
            }
            Operation::CreateRelations(all) => {
                store.memory_create_relations(name, all).await.map(drop)
            }
            Operation::AddObservations(all) => {
                store.memory_add_observations(name, all).await.map(drop)
            }
            Operation::DeleteEntities(names) => store.memory_delete_entities(name, names).await,
            Operation::DeleteObservations(all) => store.memory_delete_observations(name, all).await,
            Operation::DeleteRelations(all) => store.memory_delete_relations(name, all).await,
        }
    }
}

fn entity(name: &str, observations: &[&str]) -> MemoryEntity {
    let observations = observations.iter().map(|text| (*text).to_owned()).collect();
    MemoryEntity { name: name.into(), entity_type: "thing".into(), observations }
}

fn relation(from: &str, to: &str) -> MemoryRelation {
    MemoryRelation { from: from.into(), to: to.into(), relation_type: "uses".into() }
}

async fn random_operations_match_a_plain_model(test: TestStore) {
    let config = Config { failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRunner::deterministic().rng().clone());
    for case in 0..12 {
        let name = test.repository(&format!("case{case}")).await;
        let mut model = Model::default();
        let operations = prop::collection::vec(operation(), 1..25);
        for operation in operations.new_tree(&mut runner).unwrap().current() {
            let done = test.operate(&name, operation.clone()).await;
            assert_eq!(done.is_ok(), model.apply(&operation), "{operation:?}: {done:?}");
            assert_eq!(test.store.memory_read(&name).await.unwrap(), model.0, "{operation:?}");
        }
        // The file format keeps the graph, and replacing it keeps the order.
        let read = MemoryGraph::from_jsonl(&model.0.to_jsonl()).unwrap();
        test.store.memory_replace(&name, read).await.unwrap();
        assert_eq!(test.store.memory_read(&name).await.unwrap(), model.0);
    }
}

async fn concurrent_writers_lose_nothing(test: TestStore) {
    let name = test.repository("app").await;
    let write = async |writer: &str| {
        for number in 0..100 {
            let new = entity(&format!("{writer}{number}"), &["seen"]);
            test.store.memory_create_entities(&name, vec![new]).await.unwrap();
        }
    };
    tokio::join!(write("a"), write("b"));
    let graph = test.store.memory_read(&name).await.unwrap();
    assert_eq!(graph.entities.len(), 200);
    assert!(graph.entities.iter().all(|entity| entity.observations == ["seen"]));
}

async fn memory_is_separate_and_deleted_with_its_repository(test: TestStore) {
    let (one, other) = (test.repository("one").await, test.repository("other").await);
    let graph = MemoryGraph {
        entities: vec![entity("api", &["x"])],
        relations: vec![relation("api", "db")],
    };
    test.store.memory_replace(&one, graph.clone()).await.unwrap();
    assert_eq!(test.store.memory_read(&other).await.unwrap(), MemoryGraph::default());
    test.store.repository_delete(&one, NOW).await.unwrap();
    for table in ["memory_entities", "memory_observations", "memory_relations"] {
        assert_eq!(test.database.count(table).await, 0, "{table}");
    }
    let unknown = test.store.memory_replace(&one, graph).await.unwrap_err();
    assert!(matches!(unknown, StoreError::NotFound { .. }), "{unknown}");
}

async fn replacing_merges_entities_of_one_name(test: TestStore) {
    let name = test.repository("app").await;
    let entities = vec![entity("api", &["a", "a", "b"]), entity("api", &["b", "c"])];
    let graph =
        MemoryGraph { entities, relations: vec![relation("api", "db"), relation("api", "db")] };
    test.store.memory_replace(&name, graph).await.unwrap();
    let merged = MemoryGraph {
        entities: vec![entity("api", &["a", "b", "c"])],
        relations: vec![relation("api", "db")],
    };
    assert_eq!(test.store.memory_read(&name).await.unwrap(), merged);
}

async fn failed_operation_changes_nothing(test: TestStore) {
    let name = test.repository("app").await;
    test.store.memory_create_entities(&name, vec![entity("api", &[])]).await.unwrap();
    let about =
        |entity: &str| MemoryObservations { entity: entity.into(), contents: vec!["x".into()] };
    let failed = test.store.memory_add_observations(&name, vec![about("api"), about("db")]).await;
    assert_eq!(failed.unwrap_err().to_string(), "entity `db` not found");
    let graph = test.store.memory_read(&name).await.unwrap();
    assert_eq!(graph.entities, [entity("api", &[])]);
}

async fn names_and_graphs_have_a_limit(test: TestStore) {
    let name = test.repository("app").await;
    // The longest names fit the index of relations.
    let long = "x".repeat(512);
    let longest =
        MemoryRelation { from: long.clone(), to: "y".repeat(512), relation_type: "z".repeat(512) };
    test.store.memory_create_relations(&name, vec![longest]).await.unwrap();
    let refused = test.store.memory_create_entities(&name, vec![entity(&(long + "x"), &[])]).await;
    assert!(matches!(refused.unwrap_err(), StoreError::TooLarge { .. }));
    let text = "o".repeat(8 * 1024);
    let texts: Vec<String> = (0..20).map(|number| format!("{number}{}", &text[2..])).collect();
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    test.store.memory_create_entities(&name, vec![entity("first", &texts)]).await.unwrap();
    let refused = test.store.memory_create_entities(&name, vec![entity("big", &texts)]).await;
    assert!(refused.unwrap_err().to_string().contains("exceed 262144 characters"));
    assert_eq!(test.store.memory_read(&name).await.unwrap().entities.len(), 1);
    let nul = entity("a\0b", &["c\0"]);
    let created = test.store.memory_create_entities(&name, vec![nul]).await.unwrap();
    assert_eq!(created, [entity("a\u{2400}b", &["c\u{2400}"])]);
}

async fn too_large_calls_change_nothing(test: TestStore) {
    let name = test.repository("app").await;
    let names = |count: usize| (0..count).map(|number| number.to_string()).collect::<Vec<_>>();
    let about = |contents| vec![MemoryObservations { entity: "api".into(), contents }];
    test.store.memory_create_entities(&name, vec![entity("api", &["1"])]).await.unwrap();
    test.store.memory_create_relations(&name, vec![relation("1", "2")]).await.unwrap();
    let before = test.store.memory_read(&name).await.unwrap();
    let many = MemoryEntity { observations: names(1000), ..entity("many", &[]) };
    let relations: Vec<_> = names(1001).iter().map(|from| relation(from, "2")).collect();
    let long = vec!["x".repeat(256 * 1024)];
    for operation in [
        Operation::CreateEntities(vec![many]),
        Operation::CreateRelations(relations.clone()),
        Operation::AddObservations(about(names(1000))),
        Operation::DeleteEntities(names(1001)),
        Operation::DeleteObservations(about(names(1000))),
        Operation::DeleteRelations(relations),
        Operation::DeleteEntities(long.clone()),
        Operation::DeleteObservations(about(long)),
    ] {
        let refused = test.operate(&name, operation).await.unwrap_err().to_string();
        assert!(refused.contains("split it into several calls"), "{refused}");
    }
    assert_eq!(test.store.memory_read(&name).await.unwrap(), before);
    // The largest call is accepted; a whole graph has more items.
    test.operate(&name, Operation::AddObservations(about(names(999)))).await.unwrap();
    test.operate(&name, Operation::DeleteObservations(about(names(999)))).await.unwrap();
    let large = MemoryEntity { observations: names(2000), ..entity("large", &[]) };
    let graph = MemoryGraph { entities: vec![large], relations: Vec::new() };
    test.store.memory_replace(&name, graph.clone()).await.unwrap();
    assert_eq!(test.store.memory_read(&name).await.unwrap(), graph);
    let repeated = MemoryGraph { entities: vec![graph.entities[0].clone(); 30], ..graph.clone() };
    let refused = test.store.memory_replace(&name, repeated).await.unwrap_err().to_string();
    assert!(refused.contains("exceed 262144 characters"), "{refused}");
    assert_eq!(test.store.memory_read(&name).await.unwrap(), graph);
}

async fn repeated_observations_keep_their_order(test: TestStore) {
    let name = test.repository("app").await;
    test.store.memory_create_entities(&name, vec![entity("api", &["a"])]).await.unwrap();
    let about = |texts: &[&str]| MemoryObservations {
        entity: "api".into(),
        contents: texts.iter().map(|text| (*text).to_owned()).collect(),
    };
    let added = test
        .store
        .memory_add_observations(&name, vec![about(&["b", "a"]), about(&["b", "c\0"])])
        .await
        .unwrap();
    assert_eq!(added, [about(&["b"]), about(&["c\u{2400}"])]);
    let deleted = vec![about(&["a", "a"]), about(&["c\0"])];
    test.store.memory_delete_observations(&name, deleted).await.unwrap();
    let graph = test.store.memory_read(&name).await.unwrap();
    assert_eq!(graph.entities, [entity("api", &["b"])]);
}

async fn seed_applies_once_and_never_after_clear(test: TestStore) {
    let store = &test.store;
    let seed = || MemoryGraph {
        entities: vec![entity("api", &["seeded"]), entity("db", &[])],
        relations: vec![relation("api", "db")],
    };
    let name = test.repository("app").await;
    store.memory_create_entities(&name, vec![entity("api", &["own"])]).await.unwrap();
    assert!(!store.memory_seeded(&name).await.unwrap());
    store.memory_seed(&name, seed()).await.unwrap();
    let seeded = store.memory_read(&name).await.unwrap();
    assert_eq!(seeded.entities, [entity("api", &["own"]), entity("db", &[])]);
    assert_eq!(seeded.relations, [relation("api", "db")]);
    store.memory_delete_entities(&name, vec!["db".into()]).await.unwrap();
    store.memory_seed(&name, seed()).await.unwrap();
    assert_eq!(store.memory_read(&name).await.unwrap().entities.len(), 1);

    let cleared = test.repository("cleared").await;
    store.memory_clear(&cleared).await.unwrap();
    store.memory_seed(&cleared, seed()).await.unwrap();
    assert_eq!(store.memory_read(&cleared).await.unwrap(), MemoryGraph::default());
    assert!(store.memory_seeded(&cleared).await.unwrap());
}

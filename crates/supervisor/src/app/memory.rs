//! The first entities of a repository's memory: what Harvest knows about it, and what the
//! repository itself lists in `.harvest/memory-seed.json`. The server stores them once.

use std::path::Path;

use harvest_proto::{
    api::{MemoryEntity, MemoryGraph},
    bridge::Checkout,
};

use crate::{files, users::User};

/// A file of a repository: `{"entities": […], "relations": […]}`.
const FILE: &str = ".harvest/memory-seed.json";

// As much as a memory may have.
const MAX_BYTES: usize = 256 * 1024;

/// The seed, and a warning about a file that cannot be used. The memory is that of the first
/// repository.
pub(crate) fn seed(
    checkout: Option<&Checkout>,
    workspace: &str,
    user: &User,
) -> (MemoryGraph, Option<String>) {
    let Some(checkout) = checkout else { return (MemoryGraph::default(), None) };
    let folder = format!("{workspace}/{}", checkout.folder);
    let (mut graph, warning) = match read(&Path::new(&folder).join(FILE), user) {
        Ok(graph) => (graph, None),
        Err(why) => (MemoryGraph::default(), Some(format!("{folder}/{FILE} is not used: {why}"))),
    };
    let own = MemoryEntity {
        name: checkout.name.to_string(),
        entity_type: "repository".to_owned(),
        observations: vec![format!("It is checked out in {folder}.")],
    };
    graph.entities.insert(0, own);
    (graph, warning)
}

/// The graph in a file; empty if there is no such file. The file is the repository's.
fn read(path: &Path, user: &User) -> Result<MemoryGraph, String> {
    let read = files::read_small(path, user).map_err(|error| error.to_string())?;
    let Some(text) = read else { return Ok(MemoryGraph::default()) };
    if text.len() > MAX_BYTES {
        return Err(format!("it is longer than {MAX_BYTES} bytes"));
    }
    serde_json::from_str(&text).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn seed_of(file: Option<&str>) -> (MemoryGraph, Option<String>) {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("shop/.harvest")).unwrap();
        if let Some(text) = file {
            fs::write(folder.path().join("shop").join(FILE), text).unwrap();
        }
        let checkout = Checkout {
            name: "acme/shop".parse().unwrap(),
            folder: "shop".parse().unwrap(),
            remote: String::new(),
            url: None,
            base: None,
            branch: None,
            clone_missing: false,
        };
        let (uid, gid) = (nix::unistd::getuid().as_raw(), nix::unistd::getgid().as_raw());
        let user = User { name: "me".into(), uid, gid, home: "/".into() };
        seed(Some(&checkout), folder.path().to_str().unwrap(), &user)
    }

    #[test]
    fn repository_adds_its_own_first_entities() {
        let file = r#"{"entities": [{"name": "api", "entityType": "service", "observations": []}],
                       "relations": [{"from": "api", "to": "db", "relationType": "uses"}]}"#;
        let (graph, warning) = seed_of(Some(file));
        let names: Vec<&str> = graph.entities.iter().map(|entity| entity.name.as_str()).collect();
        assert_eq!((names, graph.relations.len(), warning), (vec!["acme/shop", "api"], 1, None));
        assert_eq!(seed_of(None).0.entities.len(), 1);
    }

    #[test]
    fn unusable_seed_is_a_warning() {
        for text in ["", "[]", r#"{"entities": 1}"#, &" ".repeat(300_000)] {
            let (graph, warning) = seed_of(Some(text));
            assert_eq!(graph.entities.len(), 1);
            assert!(warning.unwrap().contains("memory-seed.json is not used: "));
        }
    }
}

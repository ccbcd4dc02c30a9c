//! Opens the store that goes with the home. Sessions are in the database and their disks in the home, so the
//! two must not be parted: a store that knows none of the disks would have them all cleared away as nobody's.
//! Both carry the same mark, and what does not match is refused before anything is looked at.

use std::{fs, io, path::Path};

use anyhow::{Context, Result};
use harvest_proto::SessionId;
use harvest_store::{DatabaseUrl, Store};
use serde::{Deserialize, Serialize};

use crate::{config::Config, printer::Advice, wire::write_private};

/// The file of a home that was given no other database.
const OWN_FILE: &str = "harvest.db";

/// The file of a home that was.
const RECORD_FILE: &str = "database.json";

/// Under which the mark is kept in the store.
const MARK: &str = "home";

/// Which database a home goes with.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    /// Kept in the database, too.
    mark: String,
    /// Its address, without the password.
    database: String,
}

/// The store of this home.
pub(crate) async fn open(config: &Config) -> Result<Store> {
    let own = config.home.join(OWN_FILE);
    let record = read(&config.home.join(RECORD_FILE))?;
    let url = config.database.clone().filter(|url| *url != DatabaseUrl::file(&own));
    let Some(url) = url else {
        return match record {
            Some(record) => Err(elsewhere(&record.database)),
            None => Store::open(&own).await.context("cannot open the store"),
        };
    };
    if record.is_none() && own.exists() {
        return Err(elsewhere(&own.display().to_string()));
    }
    let store = Store::connect(&url).await.map_err(|error| {
        let hint = format!("see whether the database is there, and whether `{url}` is its address");
        anyhow::Error::new(error).context(Advice::new("cannot open the store", hint))
    })?;
    if let Err(error) = belong(&config.home, &store, &url.to_string(), record).await {
        store.close().await;
        return Err(error);
    }
    Ok(store)
}

/// Sees to it that home and store carry the same mark.
async fn belong(home: &Path, store: &Store, url: &str, record: Option<Record>) -> Result<()> {
    let marked = store.meta_get(MARK).await.context("cannot read the store")?;
    let new = record.is_none();
    let mark = match (record, marked) {
        (None, None) => SessionId::random().to_string().replace("ses_", "home_"),
        (Some(record), Some(mark)) if record.mark == mark && record.database == url => {
            return Ok(());
        }
        // The same database at another address.
        (Some(record), Some(mark)) if record.mark == mark => mark,
        // Killed between the two writes below.
        (Some(record), None) if record.database == url => record.mark,
        (Some(record), None) => return Err(elsewhere(&record.database)),
        (_, Some(_)) => return Err(another(url)),
    };
    claim(home, store, Record { mark, database: url.to_owned() }, new).await
}

/// Marks both, unless another home has been quicker: two that are new may find the same database empty.
async fn claim(home: &Path, store: &Store, record: Record, new: bool) -> Result<()> {
    let path = home.join(RECORD_FILE);
    write_private(&path, &serde_json::to_vec(&record)?)?;
    let mark = store.meta_claim(MARK, &record.mark).await.context("cannot write the store")?;
    if mark == record.mark {
        return Ok(());
    }
    if new {
        // It goes with no database yet.
        fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
    }
    Err(another(&record.database))
}

fn another(url: &str) -> anyhow::Error {
    let hint = "give every home a database of its own";
    Advice::new(format!("{url} holds the sessions of another home"), hint).into()
}

fn elsewhere(place: &str) -> anyhow::Error {
    let hint =
        "set `database` (HARVEST_DATABASE) to what it was, or use another home with `--home`";
    Advice::new(format!("the sessions of this home are in {place}"), hint).into()
}

fn read(path: &Path) -> Result<Option<Record>> {
    match fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes)
            .map(Some)
            .with_context(|| format!("cannot use {}", path.display())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(home: &Path, database: Option<&Path>) -> Config {
        let flags =
            crate::cli::Global { home: Some(home.to_owned()), ..crate::cli::Global::default() };
        let config = Config::load(&flags, &|_| None).unwrap();
        Config { database: database.map(DatabaseUrl::file), ..config }
    }

    async fn refused(config: &Config) -> String {
        open(config).await.unwrap_err().to_string()
    }

    #[tokio::test]
    async fn a_home_and_its_database_are_never_parted() {
        let folder = tempfile::tempdir().unwrap();
        let (one, two) = (folder.path().join("one"), folder.path().join("two"));
        let (its, other) = (folder.path().join("its.db"), folder.path().join("other.db"));
        fs::create_dir(&one).unwrap();
        fs::create_dir(&two).unwrap();
        for _ in 0..2 {
            open(&config(&one, Some(&its))).await.unwrap().close().await;
        }
        assert!(refused(&config(&one, None)).await.contains("its.db"), "not its own file");
        assert!(refused(&config(&one, Some(&other))).await.contains("its.db"), "not a new one");
        assert!(refused(&config(&two, Some(&its))).await.ends_with("another home"));
        // Moved, and still the same.
        fs::rename(&its, folder.path().join("moved.db")).unwrap();
        open(&config(&one, Some(&folder.path().join("moved.db")))).await.unwrap().close().await;
    }

    #[tokio::test]
    async fn a_home_with_sessions_in_its_own_file_gets_no_other_database() {
        let folder = tempfile::tempdir().unwrap();
        open(&config(folder.path(), None)).await.unwrap().close().await;
        let other = folder.path().join("other.db");
        assert!(refused(&config(folder.path(), Some(&other))).await.contains("harvest.db"));
        assert!(!other.exists());
        // Naming the file it has anyway changes nothing.
        let own = folder.path().join("harvest.db");
        open(&config(folder.path(), Some(&own))).await.unwrap().close().await;
    }

    #[tokio::test]
    async fn of_two_new_homes_that_found_a_database_empty_one_gets_it() {
        let folder = tempfile::tempdir().unwrap();
        let (one, two) = (folder.path().join("one"), folder.path().join("two"));
        fs::create_dir(&one).unwrap();
        fs::create_dir(&two).unwrap();
        let store =
            Store::connect(&DatabaseUrl::file(&folder.path().join("its.db"))).await.unwrap();
        let record = |mark: &str| Record { mark: mark.into(), database: "its.db".into() };
        claim(&one, &store, record("home_one"), true).await.unwrap();
        let error = claim(&two, &store, record("home_two"), true).await.unwrap_err();
        assert!(error.to_string().ends_with("another home"), "{error}");
        assert_eq!(store.meta_get(MARK).await.unwrap().as_deref(), Some("home_one"));
        assert!(one.join(RECORD_FILE).exists() && !two.join(RECORD_FILE).exists());
        store.close().await;
    }

    #[tokio::test]
    async fn a_kill_between_the_two_marks_is_made_good() {
        let folder = tempfile::tempdir().unwrap();
        let url = DatabaseUrl::file(&folder.path().join("its.db"));
        let record = Record { mark: "home_x".into(), database: url.to_string() };
        fs::write(folder.path().join(RECORD_FILE), serde_json::to_vec(&record).unwrap()).unwrap();
        let store =
            open(&Config { database: Some(url), ..config(folder.path(), None) }).await.unwrap();
        assert_eq!(store.meta_get(MARK).await.unwrap().as_deref(), Some("home_x"));
    }
}

//! Opens the database of a home. Sessions are in the database and their disks in the home: with the
//! wrong database, every disk would be removed as an orphan. Both store the same random mark, and a
//! mismatch is refused first.

use std::{
    borrow::Cow,
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use harvest_proto::{Hint, SessionId};
use harvest_store::{DatabaseUrl, Store};
use serde::{Deserialize, Serialize};

use crate::{atomic_write::write_private, config::Config, printer::Advice};

/// The database file of a home without a configured database.
pub(crate) const OWN_FILE: &str = "harvest.db";

/// Records the configured database of a home.
const RECORD_FILE: &str = "database.json";

/// The key of the mark in the store.
const MARK: &str = "home";

#[derive(Debug, Serialize, Deserialize)]
struct DatabaseRecord {
    /// Also stored in the database.
    mark: String,
    /// The URL without the password.
    database: String,
}

/// Whether the home has a database file of its own.
pub(crate) fn has_own(config: &Config) -> bool {
    config.home.join(OWN_FILE).exists()
}

/// The file with the sessions of a home, for a backup. A database on a server is refused.
pub(crate) fn file(config: &Config) -> Result<PathBuf> {
    let own = config.home.join(OWN_FILE);
    let file = match &config.database {
        None => match read(&config.home.join(RECORD_FILE))? {
            Some(record) => return Err(wrong_database(&record.database)),
            None => own,
        },
        Some(url) => match url.file_path() {
            Some(path) => path.to_owned(),
            None => {
                let home = config.home.display();
                let message = format!("the sessions of {home} are in {url}, which no backup holds");
                let hint = format!(
                    "`harvest down`, then `pg_dump` the database and copy {home}: both belong together"
                );
                return Err(Advice::new(message, hint).into());
            }
        },
    };
    match file.is_file() {
        true => Ok(file),
        false => {
            let hint = "name the home with --home or HARVEST_HOME; `harvest up` starts a new one";
            Err(Advice::new(format!("there are no sessions in {}", file.display()), hint).into())
        }
    }
}

pub(crate) async fn open(config: &Config) -> Result<Store> {
    let own = config.home.join(OWN_FILE);
    let record = read(&config.home.join(RECORD_FILE))?;
    let url = config.database.clone().filter(|url| *url != DatabaseUrl::file(&own));
    let Some(url) = url else {
        return match record {
            Some(record) => Err(wrong_database(&record.database)),
            None => Store::open(&own).await.context("cannot open the database"),
        };
    };
    if record.is_none() && own.exists() {
        return Err(wrong_database(&own.display().to_string()));
    }
    let store = Store::connect(&url).await.map_err(|error| {
        let hint = error.hint().map_or_else(
            || format!("check that the database runs and that `{url}` is its URL"),
            Cow::into_owned,
        );
        anyhow::Error::new(error).context(Advice::new("cannot open the database", hint))
    })?;
    if let Err(error) = check_mark(&config.home, &store, &url.to_string(), record).await {
        store.close().await;
        return Err(error);
    }
    Ok(store)
}

/// Checks that home and store have the same mark; marks both if they are new.
async fn check_mark(
    home: &Path,
    store: &Store,
    url: &str,
    record: Option<DatabaseRecord>,
) -> Result<()> {
    let marked = store.meta_get(MARK).await.context("cannot read the database")?;
    let new = record.is_none();
    let mark = match (record, marked) {
        (None, None) => SessionId::random().to_string().replace("ses_", "home_"),
        (Some(record), Some(mark)) if record.mark == mark && record.database == url => {
            return Ok(());
        }
        // The same database at another URL.
        (Some(record), Some(mark)) if record.mark == mark => mark,
        // The process was killed between the two writes of `claim`.
        (Some(record), None) if record.database == url => record.mark,
        (Some(record), None) => return Err(wrong_database(&record.database)),
        (_, Some(_)) => return Err(other_home(url)),
    };
    claim(home, store, DatabaseRecord { mark, database: url.to_owned() }, new).await
}

/// Marks home and store, unless another home has claimed the database meanwhile: two new homes may
/// find the same database empty.
async fn claim(home: &Path, store: &Store, record: DatabaseRecord, new: bool) -> Result<()> {
    let path = home.join(RECORD_FILE);
    write_private(&path, &serde_json::to_vec(&record)?)?;
    let mark =
        store.meta_claim(MARK, &record.mark).await.context("cannot write to the database")?;
    if mark == record.mark {
        return Ok(());
    }
    if new {
        // This home has no database yet.
        fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
    }
    Err(other_home(&record.database))
}

fn other_home(url: &str) -> anyhow::Error {
    let hint = "use a separate database for every home";
    Advice::new(format!("{url} holds the sessions of another home"), hint).into()
}

fn wrong_database(expected: &str) -> anyhow::Error {
    let hint = "set `database` (HARVEST_DATABASE) to that, or use another home with `--home`";
    Advice::new(format!("the sessions of this home are in {expected}"), hint).into()
}

fn read(path: &Path) -> Result<Option<DatabaseRecord>> {
    match fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes)
            .map(Some)
            .with_context(|| format!("cannot parse {}", path.display())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(home: &Path, database: Option<&Path>) -> Config {
        let flags = crate::cli::GlobalFlags {
            home: Some(home.to_owned()),
            ..crate::cli::GlobalFlags::default()
        };
        let config = Config::load(&flags, &|_| None).unwrap();
        Config { database: database.map(DatabaseUrl::file), ..config }
    }

    async fn refused(config: &Config) -> String {
        open(config).await.unwrap_err().to_string()
    }

    #[test]
    fn backup_refuses_database_on_a_server() {
        let folder = tempfile::tempdir().unwrap();
        let missing = file(&config(folder.path(), None)).unwrap_err();
        assert!(missing.to_string().starts_with("there are no sessions in "), "{missing}");
        let database = Some("postgres://ada:s3cret@db/harvest".parse().unwrap());
        let config = Config { database, ..config(folder.path(), None) };
        let error = file(&config).unwrap_err();
        let hint = crate::printer::hint_of(&error).unwrap();
        assert!(error.to_string().contains("postgres://ada@db/harvest"), "{error}");
        assert!(hint.contains("pg_dump") && !hint.contains("s3cret"), "{hint}");
    }

    #[tokio::test]
    async fn home_refuses_any_other_database() {
        let folder = tempfile::tempdir().unwrap();
        let (one, two) = (folder.path().join("one"), folder.path().join("two"));
        let (own, other) = (folder.path().join("its.db"), folder.path().join("other.db"));
        fs::create_dir(&one).unwrap();
        fs::create_dir(&two).unwrap();
        for _ in 0..2 {
            open(&config(&one, Some(&own))).await.unwrap().close().await;
        }
        assert!(refused(&config(&one, None)).await.contains("its.db"), "not its own file");
        assert!(refused(&config(&one, Some(&other))).await.contains("its.db"), "not a new one");
        assert!(refused(&config(&two, Some(&own))).await.ends_with("another home"));
        // A moved database is still the same one.
        fs::rename(&own, folder.path().join("moved.db")).unwrap();
        open(&config(&one, Some(&folder.path().join("moved.db")))).await.unwrap().close().await;
    }

    #[tokio::test]
    async fn home_with_own_file_refuses_another_database() {
        let folder = tempfile::tempdir().unwrap();
        open(&config(folder.path(), None)).await.unwrap().close().await;
        let other = folder.path().join("other.db");
        assert!(refused(&config(folder.path(), Some(&other))).await.contains("harvest.db"));
        assert!(!other.exists());
        // The configuration may name the home's own file.
        let own = folder.path().join("harvest.db");
        open(&config(folder.path(), Some(&own))).await.unwrap().close().await;
    }

    #[tokio::test]
    async fn only_one_of_two_homes_claims_a_database() {
        let folder = tempfile::tempdir().unwrap();
        let (one, two) = (folder.path().join("one"), folder.path().join("two"));
        fs::create_dir(&one).unwrap();
        fs::create_dir(&two).unwrap();
        let store =
            Store::connect(&DatabaseUrl::file(&folder.path().join("its.db"))).await.unwrap();
        let record = |mark: &str| DatabaseRecord { mark: mark.into(), database: "its.db".into() };
        claim(&one, &store, record("home_one"), true).await.unwrap();
        let error = claim(&two, &store, record("home_two"), true).await.unwrap_err();
        assert!(error.to_string().ends_with("another home"), "{error}");
        assert_eq!(store.meta_get(MARK).await.unwrap().as_deref(), Some("home_one"));
        assert!(one.join(RECORD_FILE).exists() && !two.join(RECORD_FILE).exists());
        store.close().await;
    }

    #[tokio::test]
    async fn kill_between_both_marks_is_repaired() {
        let folder = tempfile::tempdir().unwrap();
        let url = DatabaseUrl::file(&folder.path().join("its.db"));
        let record = DatabaseRecord { mark: "home_x".into(), database: url.to_string() };
        fs::write(folder.path().join(RECORD_FILE), serde_json::to_vec(&record).unwrap()).unwrap();
        let store =
            open(&Config { database: Some(url), ..config(folder.path(), None) }).await.unwrap();
        assert_eq!(store.meta_get(MARK).await.unwrap().as_deref(), Some("home_x"));
    }
}

//! What a person names with `-r`: a folder, a URL or a registered repository; with nothing named, the
//! repository around the current folder. Folders and new URLs are registered on the way.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use harvest_proto::api::{AddRepository, Repository, UseRepository};

use crate::{
    Invocation,
    client::Client,
    printer::{Advice, Refused},
    publish::{Naming, enclosing, forge, publish},
};

/// What one `-r` means.
#[derive(Debug, PartialEq, Eq)]
enum Named {
    Name(String),
    Url(String),
    Folder(PathBuf),
}

/// The repositories of a session to be.
pub(crate) async fn repositories(
    here: &Invocation,
    client: &Client,
    typed: &[String],
) -> Result<Vec<UseRepository>> {
    if typed.is_empty() {
        return around(here, client).await;
    }
    let mut all = Vec::with_capacity(typed.len());
    for typed in typed {
        let known = client.repositories().await?;
        all.push(match named(typed, &known)? {
            Named::Name(name) => by_name(name),
            Named::Url(url) => by_name(registered(here, client, &url, &known).await?),
            Named::Folder(folder) => {
                if let Some(around) =
                    folder.canonicalize().ok().and_then(|folder| enclosing(&folder))
                    && !is_repository(&folder)
                {
                    let (folder, around) = (folder.display(), around.display());
                    here.print
                        .note(format!("{folder} is taken by itself, not {around}, which it is in"));
                }
                taken(here, client, &folder).await?
            }
        });
    }
    Ok(all)
}

/// The repository around the current folder, or none.
async fn around(here: &Invocation, client: &Client) -> Result<Vec<UseRepository>> {
    let current = std::env::current_dir().context("cannot find the current folder")?;
    let Some(folder) = enclosing(&current) else {
        here.print.note("No repository here: the session begins in an empty /workspace");
        here.print.hint("-r FOLDER|URL|NAME names one");
        return Ok(Vec::new());
    };
    Ok(vec![taken(here, client, &folder).await?])
}

fn by_name(name: String) -> UseRepository {
    UseRepository { name: Some(name), ..UseRepository::default() }
}

fn is_repository(folder: &Path) -> bool {
    folder.join(".git").exists() || folder.join("HEAD").is_file()
}

/// A registered name means the repository; `./name` is the folder in any case.
fn named(typed: &str, known: &[Repository]) -> Result<Named> {
    if typed.contains("://") {
        return Ok(Named::Url(typed.to_owned()));
    }
    if known.iter().any(|known| known.name == typed) {
        return Ok(Named::Name(typed.to_owned()));
    }
    let path = Path::new(typed);
    if path.is_dir() {
        return Ok(Named::Folder(path.to_owned()));
    }
    let (what, hint) = match () {
        () if path.exists() => (format!("`{typed}` is not a folder"), "name the folder it is in"),
        () if typed.contains(':') => (
            format!("`{typed}` is not an http or https URL"),
            "write it as https://HOST/PATH; its token is kept with `harvest secret set`",
        ),
        () => (
            format!("there is no repository and no folder `{typed}`"),
            "`harvest repo ls` lists repositories; a git URL in place of the name registers it",
        ),
    };
    bail!(Advice::new(what, hint))
}

/// A folder's copy on the forge, up to date.
async fn taken(here: &Invocation, client: &Client, folder: &Path) -> Result<UseRepository> {
    let forge = forge(here)?;
    let add = AddRepository::default();
    let published = publish(here.print, client, &forge, (folder, Naming::Numbered), add).await?;
    let name = published.repository.name;
    if published.new {
        here.print.note(format!("Copied {} to the local forge as {name}", folder.display()));
    }
    Ok(UseRepository { base: Some(published.branch), ..by_name(name) })
}

/// The name of what is at a URL; one nobody registered is registered now.
async fn registered(
    here: &Invocation,
    client: &Client,
    url: &str,
    known: &[Repository],
) -> Result<String> {
    if let Some(repository) = known.iter().find(|repository| same_url(&repository.url, url)) {
        return Ok(repository.name.clone());
    }
    let request = AddRepository { url: url.to_owned(), ..AddRepository::default() };
    let added = client.repository_add(&request).await.map_err(|error| {
        match error.downcast_ref::<Refused>() {
            Some(refused) if refused.0.status == 409 => error.context(Advice::new(
                "another repository has that name",
                "register it with `harvest repo add --name`",
            )),
            _ => error,
        }
    })?;
    here.print.note(format!("Registered {} as {}", added.url, added.name));
    Ok(added.name)
}

fn same_url(left: &str, right: &str) -> bool {
    let plain = |url: &str| url.trim_end_matches('/').trim_end_matches(".git").to_owned();
    plain(left) == plain(right)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_the_same_with_and_without_its_ending() {
        assert!(same_url("http://h/a.git", "http://h/a/"));
        assert!(!same_url("http://h/a", "http://h/b"));
    }

    #[test]
    fn what_is_registered_comes_before_a_folder_of_that_name() {
        let known = [Repository {
            name: "src".into(),
            url: "https://h/src".into(),
            base: None,
            secret: None,
            image: "claude".into(),
            build: None,
            created_at: harvest_proto::Timestamp::from_millis(0),
        }];
        // Tests run in the crate's folder, which has one.
        assert_eq!(named("src", &known).unwrap(), Named::Name("src".into()));
        assert_eq!(named("./src", &known).unwrap(), Named::Folder("./src".into()));
        assert_eq!(named("src", &[]).unwrap(), Named::Folder("src".into()));
        assert_eq!(named("https://h/x", &known).unwrap(), Named::Url("https://h/x".into()));
        for unknown in ["nope", "git@h:a.git", "Cargo.toml"] {
            assert!(named(unknown, &known).is_err(), "{unknown}");
        }
    }
}

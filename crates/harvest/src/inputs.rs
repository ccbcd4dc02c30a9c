//! Resolves `-r`: a folder, a URL or a registered repository; without it, the repository around the
//! current folder. Folders and new URLs are registered.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use harvest_proto::{
    RepositoryName, RepositoryRef,
    api::{AddRepository, Repository, UseRepository},
    repository_address::{ADDRESS_FORMS, is_same_url, is_short, of_ssh},
};

use crate::{
    Invocation,
    client::Client,
    printer::{Advice, ApiRefusal, Printer},
    publish::{NameConflict, Source, enclosing, forge, is_published, publish},
};

#[derive(Debug, PartialEq, Eq)]
enum RepositoryInput {
    Name(RepositoryRef),
    Url(String),
    Folder(PathBuf),
}

/// The repositories of a new session.
pub(crate) async fn repositories(
    ctx: &Invocation,
    client: &Client,
    typed: &[String],
    all_files: bool,
    from_snapshot: bool,
) -> Result<Vec<UseRepository>> {
    if typed.is_empty() {
        return from_current_folder(ctx, client, from_snapshot).await;
    }
    let mut all = Vec::with_capacity(typed.len());
    for typed in typed {
        let known = client.repositories().await?;
        all.push(match parse(typed, &known)? {
            RepositoryInput::Name(name) => by_name(name),
            // Only the server knows where it is.
            RepositoryInput::Url(name) if is_short(&name) => {
                UseRepository { url: Some(name), ..UseRepository::default() }
            }
            RepositoryInput::Url(url) => {
                by_name(registered(ctx, client, &url, &known).await?.into())
            }
            RepositoryInput::Folder(folder) => {
                if let Some(around) =
                    folder.canonicalize().ok().and_then(|folder| enclosing(&folder))
                    && !is_repository(&folder)
                {
                    let (folder, around) = (folder.display(), around.display());
                    ctx.print.note(format!(
                        "using the folder {folder}, not the repository {around} around it"
                    ));
                }
                from_folder(ctx, client, &folder, all_files).await?
            }
        });
    }
    Ok(all)
}

/// Whether one of the repositories of a new session is registered already, so that it may have
/// secrets of its own.
pub(crate) async fn any_registered(
    ctx: &Invocation,
    client: &Client,
    typed: &[String],
) -> Result<bool> {
    let known = client.repositories().await?;
    let current = || {
        let folder = std::env::current_dir().ok().and_then(|current| enclosing(&current));
        folder.map(RepositoryInput::Folder)
    };
    let inputs: Vec<RepositoryInput> = match typed.is_empty() {
        true => current().into_iter().collect(),
        false => typed.iter().map(|typed| parse(typed, &known)).collect::<Result<_>>()?,
    };
    Ok(inputs.iter().any(|input| match input {
        RepositoryInput::Name(_) => true,
        RepositoryInput::Url(address) => {
            let url = of_ssh(address).unwrap_or_else(|| address.clone());
            let short = format!("/{address}");
            known.iter().any(|one| {
                is_same_url(&one.url, &url)
                    || (is_short(address) && one.url.trim_end_matches(".git").ends_with(&short))
            })
        }
        RepositoryInput::Folder(folder) => is_published(ctx, folder, &known),
    }))
}

async fn from_current_folder(
    ctx: &Invocation,
    client: &Client,
    from_snapshot: bool,
) -> Result<Vec<UseRepository>> {
    let current = std::env::current_dir().context("cannot find the current folder")?;
    let Some(folder) = enclosing(&current) else {
        match from_snapshot {
            true => ctx.print.note("The session starts with the files of the snapshot"),
            false => {
                ctx.print.note(
                    "No repository in this folder: the session starts in an empty /workspace",
                );
                ctx.print.hint("choose one with `-r FOLDER|URL|NAME`");
            }
        }
        return Ok(Vec::new());
    };
    Ok(vec![from_folder(ctx, client, &folder, false).await?])
}

fn by_name(name: RepositoryRef) -> UseRepository {
    UseRepository { name: Some(name), ..UseRepository::default() }
}

fn is_repository(folder: &Path) -> bool {
    folder.join(".git").exists() || folder.join("HEAD").is_file()
}

/// A registered name has precedence over a folder of that name; `./name` is always the folder. The
/// server resolves a name without an owner.
fn parse(typed: &str, known: &[Repository]) -> Result<RepositoryInput> {
    if typed.contains("://") || of_ssh(typed).is_some() {
        return Ok(RepositoryInput::Url(typed.to_owned()));
    }
    if let Ok(name) = typed.parse::<RepositoryRef>()
        && known.iter().any(|known| name.matches(&known.name))
    {
        return Ok(RepositoryInput::Name(name));
    }
    let path = Path::new(typed);
    if path.is_dir() {
        return Ok(RepositoryInput::Folder(path.to_owned()));
    }
    if !path.exists() && is_short(typed) {
        return Ok(RepositoryInput::Url(typed.to_owned()));
    }
    let (what, hint) = match () {
        () if path.exists() => {
            (format!("`{typed}` is not a folder"), "name the folder that contains it".to_owned())
        }
        () if typed.contains(':') => (
            format!("`{typed}` is no address of a repository"),
            format!("use {ADDRESS_FORMS}, or a folder"),
        ),
        () => (
            format!("there is no repository and no folder `{typed}`"),
            "`harvest repo ls` lists repositories; a git URL or OWNER/NAME at GitHub registers one"
                .to_owned(),
        ),
    };
    bail!(Advice::new(what, hint))
}

/// Copies a folder to the local forge, or updates its copy.
async fn from_folder(
    ctx: &Invocation,
    client: &Client,
    folder: &Path,
    all: bool,
) -> Result<UseRepository> {
    let forge = forge(ctx)?;
    let add = AddRepository::default();
    let source = Source { folder, naming: NameConflict::AddNumber, all };
    let published = publish(ctx.print, client, &forge, source, add).await?;
    let name = published.repository.name;
    if published.new {
        ctx.print.note(format!("Copied {} to the local forge as {name}", folder.display()));
    }
    Ok(UseRepository { base: Some(published.branch), ..by_name(name.into()) })
}

/// The name of the repository at a URL, which is registered if it is new.
async fn registered(
    ctx: &Invocation,
    client: &Client,
    url: &str,
    known: &[Repository],
) -> Result<RepositoryName> {
    let url = &https_address(ctx.print, url);
    if let Some(repository) = known.iter().find(|repository| is_same_url(&repository.url, url)) {
        return Ok(repository.name.clone());
    }
    let request = AddRepository { url: url.to_owned(), ..AddRepository::default() };
    let added = client.repository_add(&request).await.map_err(|error| {
        match error.downcast_ref::<ApiRefusal>() {
            Some(refused) if refused.0.status == 409 => error.context(Advice::new(
                "another repository has the same name",
                "register it under another name with `harvest repo add URL --name OWNER/NAME`",
            )),
            _ => error,
        }
    })?;
    ctx.print.note(format!("Registered {} as {}", added.url, added.name));
    Ok(added.name)
}

/// The URL that an SSH address stands for. Tells the user when it is not what was typed.
pub(crate) fn https_address(print: Printer, address: &str) -> String {
    match of_ssh(address) {
        Some(url) => {
            print.note(format!("{address} is read over HTTPS: {url}"));
            url
        }
        None => address.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registered_name_precedes_folder() {
        let known = [Repository {
            name: "local/src".parse().unwrap(),
            url: "https://h/src".into(),
            base: None,
            secret: None,
            image: None,
            build: None,
            created_at: harvest_proto::Timestamp::from_millis(0),
        }];
        // Tests run in the crate's folder, which contains `src`.
        for name in ["src", "local/src"] {
            let expected = RepositoryInput::Name(name.parse().unwrap());
            assert_eq!(parse(name, &known).unwrap(), expected);
        }
        assert_eq!(parse("./src", &known).unwrap(), RepositoryInput::Folder("./src".into()));
        assert_eq!(parse("src", &[]).unwrap(), RepositoryInput::Folder("src".into()));
        assert_eq!(
            parse("https://h/x", &known).unwrap(),
            RepositoryInput::Url("https://h/x".into())
        );
        for address in ["acme/app", "git@h:a/b.git", "ssh://git@h/a/b"] {
            let expected = RepositoryInput::Url(address.into());
            assert_eq!(parse(address, &known).unwrap(), expected);
        }
        for unknown in ["nope", "h:a.git", "local/nope", "Cargo.toml", "src/main.rs"] {
            assert!(parse(unknown, &known).is_err(), "{unknown}");
        }
    }
}

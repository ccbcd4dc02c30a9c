//! `harvest pull`: brings a session's branch into a folder of the user, as a branch. Commits that
//! were not pushed come too; uncommitted work does not.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use futures_util::StreamExt as _;
use harvest_proto::{BranchName, RepositoryName, api::SessionRepository};
use harvest_server::in_process::RequestBody;
use reqwest::{Method, header::HeaderMap};
use serde::Serialize;

use crate::{
    Invocation,
    bundle::BundleHeader,
    cli::PullArgs,
    client::{ByteStream, query},
    local_repository::LocalRepository,
    printer::{Advice, count},
    publish,
    render::short_commit,
    sanitize::sanitize_line,
};

/// What was brought.
#[derive(Debug, Serialize)]
struct Pulled {
    repository: RepositoryName,
    folder: String,
    branch: BranchName,
    commit: String,
    /// The commits of the branch that its base lacks.
    commits: u64,
    change: BranchChange,
    /// Files with changes in the session that are in no commit.
    uncommitted: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum BranchChange {
    Created,
    Moved,
    None,
}

pub(crate) async fn run(ctx: &Invocation, args: &PullArgs) -> Result<u8> {
    let (client, id) = ctx.session(&args.session.session).await?;
    let repositories = client.session(&id).await?.repositories;
    let fits = |one: &&SessionRepository| {
        args.repository.as_ref().is_none_or(|wanted| wanted.matches(&one.name))
    };
    let found: Vec<&SessionRepository> = repositories.iter().filter(fits).collect();
    let folder = match (&args.into, found.as_slice()) {
        (Some(folder), _) => Some(folder.clone()),
        (None, [only]) => source_folder(ctx, only),
        // The server says what is wrong.
        (None, _) => None,
    };
    let folder = match (folder, found.as_slice()) {
        (Some(folder), _) => Some(LocalRepository::open(&folder).await?),
        (None, [only]) => {
            let what = format!("{} was not added from a folder on this machine", only.name);
            bail!(Advice::usage(what, "`--into FOLDER` names the clone that gets the branch"))
        }
        (None, _) => None,
    };
    let mut path = format!("/v1/sessions/{id}/bundle");
    if let Some(name) = &args.repository {
        path = format!("{path}?{}", query(&[("repository", name)]));
    }
    let (headers, mut pieces) = client.exchange(Method::GET, &path, RequestBody::Empty).await?;
    let folder = folder.context("the session has no such repository")?;
    let pulled = receive(&folder, &headers, &mut pieces, args.r#as.as_ref()).await?;
    ctx.print.result(&pulled, text)?;
    if pulled.uncommitted > 0 {
        let files = count(pulled.uncommitted, "file");
        ctx.print.warn(format!("{files} with uncommitted changes in the session are not brought"));
        ctx.print.hint(format!("`harvest send {id} \"commit your work\"`, then pull again"));
    }
    Ok(0)
}

/// The folder that a repository was copied from.
fn source_folder(ctx: &Invocation, repository: &SessionRepository) -> Option<PathBuf> {
    let forge = publish::forge(ctx).ok()?;
    forge.source_folder(forge.repository_name(&repository.url)?.name())
}

async fn receive(
    folder: &LocalRepository,
    headers: &HeaderMap,
    pieces: &mut ByteStream,
    wanted: Option<&BranchName>,
) -> Result<Pulled> {
    let header = |name: &str| {
        let value = headers.get(name).and_then(|value| value.to_str().ok());
        value.with_context(|| format!("the server sent no header `{name}`"))
    };
    let repository: RepositoryName = header("x-harvest-repository")?.parse()?;
    let theirs: BranchName = header("x-harvest-branch")?.parse()?;
    let uncommitted = header("x-harvest-uncommitted")?.parse()?;
    let branch = wanted.unwrap_or(&theirs).clone();
    let (bundle, pack) = read_header(pieces, &theirs).await?;
    let BundleHeader { prerequisites, commit } = bundle;
    if let Some(missing) = folder.missing(&prerequisites).await? {
        let short = short_commit(&missing);
        let what =
            format!("{} lacks commit {short}, which the work begins at", folder.folder.display());
        bail!(Advice::new(what, "`git fetch` in that folder brings it; then pull again"));
    }
    let before = folder.branch(&branch).await?;
    let change = match &before {
        None => BranchChange::Created,
        Some(before) if *before == commit => BranchChange::None,
        Some(_) => BranchChange::Moved,
    };
    if change != BranchChange::None {
        let other = format!("`--as NAME` brings it as another branch than {branch}");
        if let Some(at) = folder.checked_out_in(&branch).await? {
            let what = format!("branch {branch} is checked out in {}", sanitize_line(&at));
            bail!(Advice::new(what, other));
        }
        folder.add_pack(&pack, pieces).await?;
        if let Some(before) = &before
            && !folder.is_ancestor(before, &commit).await?
        {
            let what = format!("branch {branch} has commits that the session's branch lacks");
            bail!(Advice::new(what, other));
        }
        let set = folder.set_branch(&branch, &commit, before.as_deref()).await;
        set.map_err(|error| {
            error.context(Advice::new(format!("cannot set branch {branch}"), other))
        })?;
    }
    let commits = folder.count(&commit, &prerequisites).await?;
    let folder = folder.folder.display().to_string();
    Ok(Pulled { repository, folder, branch, commit, commits, change, uncommitted })
}

/// The header of the bundle, and the bytes after it that were read.
async fn read_header(pieces: &mut ByteStream, branch: &str) -> Result<(BundleHeader, Vec<u8>)> {
    let mut bytes = Vec::new();
    loop {
        if let Some((header, length)) = BundleHeader::read(&bytes, branch)? {
            return Ok((header, bytes.split_off(length)));
        }
        let piece = pieces.next().await.context("the server sent no complete git bundle")?;
        bytes.extend(piece.context("the download broke off")?);
    }
}

fn text(pulled: &Pulled) -> String {
    let Pulled { folder, branch, commit, commits, change, .. } = pulled;
    let (commits, short) = (count(*commits, "commit"), short_commit(commit));
    let folder = sanitize_line(folder);
    match change {
        BranchChange::None => format!("{branch} in {folder} is up to date at {short}\n"),
        _ => format!("{branch} in {folder} is at {short}, with {commits} of the session\n"),
    }
}

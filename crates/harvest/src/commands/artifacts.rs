//! `harvest artifacts`: lists and downloads the files that a session's agents handed over.

use std::{
    fs::File,
    io::Write as _,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use futures_util::StreamExt as _;
use harvest_proto::api::Artifact;
use harvest_server::in_process::RequestBody;
use reqwest::Method;

use super::ls::age;
use crate::{
    Invocation,
    cli::{ArtifactsArgs, units},
    printer::{Advice, write_bytes},
};

pub(crate) async fn run(ctx: &Invocation, args: ArtifactsArgs) -> Result<u8> {
    let (client, id) = ctx.session(&args.session).await?;
    let folder = format!("/v1/sessions/{id}/artifacts");
    let Some(name) = args.name else {
        let all: Vec<Artifact> = client.all(&folder).await?;
        if all.is_empty() && !ctx.print.json {
            ctx.print.note("No artifacts yet");
            return Ok(0);
        }
        ctx.print.list(&all, ["NAME…", "SIZE", "TYPE", "AGE"], row)?;
        return Ok(0);
    };
    let target = args.output.unwrap_or_else(|| PathBuf::from(&name));
    let path = format!("{folder}/{}", encode(&name));
    let (_, mut pieces) = client.exchange(Method::GET, &path, RequestBody::Empty).await?;
    if target == Path::new("-") {
        while let Some(piece) = pieces.next().await {
            write_bytes(&piece.context("the download broke off")?)?;
        }
        return Ok(0);
    }
    let mut file = create(&target)?;
    while let Some(piece) = pieces.next().await {
        file.write_all(&piece.context("the download broke off")?)?;
    }
    ctx.print.note(format!("Saved {}", target.display()));
    Ok(0)
}

/// An existing file is kept: the name is the agent's choice.
fn create(target: &Path) -> Result<File> {
    File::options().write(true).create_new(true).open(target).map_err(|error| {
        let what = format!("cannot create {}: {error}", target.display());
        Advice::new(what, "choose another file with `-o FILE`; `-o -` prints it").into()
    })
}

fn row(artifact: &Artifact) -> [String; 4] {
    [
        artifact.name.clone(),
        units::bytes(artifact.bytes),
        artifact.media_type.clone(),
        age(artifact.created_at),
    ]
}

/// Percent-encodes a name for a path.
fn encode(name: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-~".contains(&byte);
    name.bytes().fold(String::new(), |out, byte| match plain(byte) {
        true => out + &char::from(byte).to_string(),
        false => out + &format!("%{byte:02X}"),
    })
}

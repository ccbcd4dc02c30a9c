//! What sandboxes there are and what is known of each.

use std::time::SystemTime;

use anyhow::{Context, Result};
use harvest_engine::{Engine, Image, Inspected, Network, Origin, Owner, SandboxState, VolumeMount};
use harvest_proto::Timestamp;
use serde_json::{Value, json};

use super::super::ls::age;
use crate::{
    Invocation,
    printer::table,
    resolve::{self, Sandboxes},
};

pub(super) fn ls(here: &Invocation, engine: &Engine) -> Result<()> {
    let Sandboxes { known: sandboxes, torn } = resolve::sandboxes(engine).context("cannot list sandboxes")?;
    for (id, error) in &torn {
        here.print.note(format!("{id}: {error}"));
        here.print.hint(format!("`harvest sandbox rm --force {id}` throws away what is left of it"));
    }
    let images = engine.images().context("cannot list images")?;
    if sandboxes.is_empty() && torn.is_empty() && !here.print.json {
        here.print.note("no sandboxes yet");
        here.print
            .hint("`harvest sandbox create` starts one that stays; `harvest exec -- COMMAND` needs none");
        return Ok(());
    }
    let documents: Vec<Value> = sandboxes.iter().map(|sandbox| document(sandbox, &images)).collect();
    let now = Timestamp::from(SystemTime::now());
    here.print.result(&documents, |_| {
        let rows: Vec<_> = sandboxes.iter().map(|sandbox| row(sandbox, &images, now)).collect();
        table(&["ID", "STATE", "IMAGE", "OWNER", "NETWORK", "AGE"], &rows)
    })
}

pub(super) fn inspect(here: &Invocation, engine: &Engine, typed: &str) -> Result<()> {
    let id = resolve::sandbox(engine, typed)?;
    let sandbox = engine.inspect(&id)?.with_context(|| format!("{id} is gone"))?;
    let images = engine.images().context("cannot list images")?;
    let document = document(&sandbox, &images);
    here.print.result(&document, |document| {
        let mut shown = document.clone();
        shown["volumes"] = sandbox.spec.volumes.iter().map(volume).collect();
        lines(&shown, "")
    })
}

/// As it is written on a command line.
fn volume(mount: &VolumeMount) -> String {
    let mode = if mount.read_only { ":ro" } else { "" };
    format!("{}:{}{mode}", mount.name, mount.inside.display())
}

fn row(sandbox: &Inspected, images: &[Image], now: Timestamp) -> Vec<String> {
    let spec = &sandbox.spec;
    vec![
        spec.id.to_string(),
        state(sandbox).0.to_owned(),
        image(sandbox, images).unwrap_or("–").to_owned(),
        owner(spec.owner),
        network(spec.network).to_owned(),
        age(now.since(sandbox.created_at).as_secs()),
    ]
}

/// What a program is told: names that stay.
fn document(sandbox: &Inspected, images: &[Image]) -> Value {
    let spec = &sandbox.spec;
    let (word, reason) = state(sandbox);
    let pid = match &sandbox.state {
        SandboxState::Running(running) => Some(running.pid),
        _ => None,
    };
    let Origin::Layers { layers, config } = &spec.from else { return Value::Null };
    json!({
        "id": spec.id,
        "state": word,
        "reason": reason,
        "pid": pid,
        "image": image(sandbox, images),
        "owner": owner(spec.owner),
        "network": network(spec.network),
        "limits": spec.limits,
        "volumes": spec.volumes,
        "env": spec.env,
        "user": config.user,
        "workdir": config.workdir,
        "layers": layers,
        "created_at": sandbox.created_at,
    })
}

fn state(sandbox: &Inspected) -> (&'static str, Option<&str>) {
    match &sandbox.state {
        SandboxState::Running(_) => ("running", None),
        SandboxState::Dead { reason } => ("dead", Some(reason)),
        SandboxState::Gone => ("gone", None),
    }
}

/// The image it grew from: the one that makes up most of it.
fn image<'a>(sandbox: &Inspected, images: &'a [Image]) -> Option<&'a str> {
    let Origin::Layers { layers, .. } = &sandbox.spec.from else { return None };
    let grown = images.iter().filter(|image| layers.starts_with(&image.layers));
    grown.max_by_key(|image| image.layers.len()).map(|image| image.name.as_str())
}

fn owner(owner: Owner) -> String {
    match owner {
        Owner::Kept => "you".to_owned(),
        Owner::Sessions => "session".to_owned(),
        Owner::Process(pid) => format!("process {pid}"),
    }
}

fn network(network: Network) -> &'static str {
    match network {
        Network::Nothing => "none",
        Network::Door => "gateway",
        Network::Host => "host",
    }
}

/// A document for people: one line per value.
fn lines(value: &Value, indent: &str) -> String {
    let Value::Object(fields) = value else { return String::new() };
    let mut text = String::new();
    for (name, value) in fields.iter().filter(|(_, value)| !value.is_null()) {
        text += &match value {
            Value::Object(inner) if inner.is_empty() => continue,
            Value::Object(_) => format!("{indent}{name}\n{}", lines(value, &format!("{indent}  "))),
            Value::Array(items) => {
                let items: Vec<String> = items.iter().map(shown).collect();
                format!("{indent}{name:<12}  {}\n", items.join(" "))
            }
            value => format!("{indent}{name:<12}  {}\n", shown(value)),
        };
    }
    text
}

fn shown(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

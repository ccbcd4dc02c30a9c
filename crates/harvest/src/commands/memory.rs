//! `harvest memory`: shows, imports, exports and clears what agents remembered about a repository.

use std::{fmt::Write as _, path::Path};

use anyhow::{Context, Result};
use harvest_proto::{RepositoryName, RepositoryRef, api::MemoryGraph};
use reqwest::Method;
use serde_json::json;

use crate::{Invocation, cli::MemoryCommand, client::Client, confirm, printer::Advice};

pub(crate) async fn run(ctx: &Invocation, verb: MemoryCommand) -> Result<u8> {
    let client = Client::find(&ctx.config)?;
    match verb {
        MemoryCommand::Show { repository } => {
            let (name, _, graph) = read(&client, &repository).await?;
            ctx.print.result(&graph, describe)?;
            if graph == MemoryGraph::default() {
                ctx.print.note(format!("Nothing is remembered about {name}"));
            }
        }
        MemoryCommand::Export { repository } => {
            let (_, _, graph) = read(&client, &repository).await?;
            match ctx.print.json {
                true => ctx.print.document(&graph)?,
                false => ctx.print.verbatim(&graph.to_jsonl())?,
            }
        }
        MemoryCommand::Import { repository, file, yes } => {
            let imported = read_file(&file)?;
            let (name, path, current) = read(&client, &repository).await?;
            if current != MemoryGraph::default() {
                confirm::removal(ctx.print, yes, &format!("the memory of {name}"))?;
            }
            let request = client.request(Method::PUT, &path).json(&imported);
            let stored: MemoryGraph = client.call(request).await.context("cannot import")?;
            ctx.print.document(&stored)?;
            ctx.print.note(format!("Imported {} into the memory of {name}", counts(&stored)));
        }
        MemoryCommand::Clear { repository, yes } => {
            let (name, path, graph) = read(&client, &repository).await?;
            if graph != MemoryGraph::default() {
                confirm::removal(ctx.print, yes, &format!("the memory of {name}"))?;
            }
            client.delete(&path).await?;
            ctx.print.document(&json!({ "cleared": name }))?;
            ctx.print.note(format!("Removed {} from the memory of {name}", counts(&graph)));
        }
    }
    Ok(0)
}

/// The repository's name, the path of its memory, and the memory.
async fn read(
    client: &Client,
    repository: &RepositoryRef,
) -> Result<(RepositoryName, String, MemoryGraph)> {
    let name = client.repository(repository).await?.name;
    let path = format!("/v1/repositories/{name}/memory");
    let graph = client.get(&path).await?;
    Ok((name, path, graph))
}

fn read_file(file: &Path) -> Result<MemoryGraph> {
    let text = match file == Path::new("-") {
        true => std::io::read_to_string(std::io::stdin()).context("cannot read standard input")?,
        false => std::fs::read_to_string(file)
            .with_context(|| format!("cannot read {}", file.display()))?,
    };
    MemoryGraph::from_jsonl(&text).map_err(|error| {
        let hint = "name a file of the MCP memory server, or of `harvest memory export`";
        Advice::new(format!("{}: {error}", file.display()), hint).into()
    })
}

/// The graph for people: each entity with its observations, then the relations.
fn describe(graph: &MemoryGraph) -> String {
    let mut text = String::new();
    for entity in &graph.entities {
        let _ = writeln!(text, "{} ({})", entity.name, entity.entity_type);
        for observation in &entity.observations {
            let _ = writeln!(text, "  - {}", observation.replace('\n', "\n    "));
        }
    }
    for relation in &graph.relations {
        let _ = writeln!(text, "{} {} {}", relation.from, relation.relation_type, relation.to);
    }
    text
}

fn counts(graph: &MemoryGraph) -> String {
    let entities = match graph.entities.len() {
        1 => "1 entity".to_owned(),
        count => format!("{count} entities"),
    };
    let relations = match graph.relations.len() {
        1 => "1 relation".to_owned(),
        count => format!("{count} relations"),
    };
    format!("{entities} and {relations}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn graph_is_printed_entity_by_entity() {
        let graph = MemoryGraph::from_jsonl(
            "{\"type\":\"entity\",\"name\":\"api\",\"entityType\":\"service\",\
              \"observations\":[\"port 80\",\"two\\nlines\"]}\n\
             {\"type\":\"relation\",\"from\":\"api\",\"to\":\"db\",\"relationType\":\"uses\"}",
        )
        .unwrap();
        let shown = "api (service)\n  - port 80\n  - two\n    lines\napi uses db\n";
        assert_eq!(describe(&graph), shown);
        assert_eq!(counts(&graph), "1 entity and 1 relation");
        assert_eq!(counts(&MemoryGraph::default()), "0 entities and 0 relations");
    }
}

//! `harvest pr`: prints a session's pull requests with the result of Harvest's own check.

use anyhow::Result;
use harvest_proto::api::PullRequest;

use crate::{
    Invocation,
    cli::PrCommand,
    printer::human_millis,
    render::{describe_exit, markdown_text, short_commit},
    sanitize::sanitize,
    style::Palette,
};

pub(crate) async fn run(ctx: &Invocation, verb: &PrCommand) -> Result<u8> {
    let PrCommand::Show(args) = verb;
    let (client, id) = ctx.session(&args.session).await?;
    let first = client.pull_request(&id).await?;
    let repositories = client.session(&id).await?.repositories;
    let all: Vec<&PullRequest> =
        repositories.iter().filter_map(|repository| repository.pr.as_ref()).collect();
    // `--json` prints the first pull request; `show` has one for each repository.
    match ctx.print.json {
        true => ctx.print.document(&first)?,
        false => {
            let text = |one| text(one, ctx.print.stdout);
            ctx.print.styled_out(&all.into_iter().map(text).collect::<Vec<_>>().join("\n"))?;
        }
    }
    Ok(0)
}

/// Formats a pull request as lines of `name  value`, followed by its rendered description.
pub(crate) fn text(pull_request: &PullRequest, style: Palette) -> String {
    let mut text = String::new();
    let mut add = |name: &str, value: String| text += &format!("{name:<14}{value}\n");
    add("pull request", format!("#{} {}", pull_request.number, pull_request.state));
    add("url", pull_request.url.clone());
    add("title", pull_request.title.clone());
    add("branch", format!("{} → {}", pull_request.branch, pull_request.base));
    add("commit", pull_request.commit.clone());
    match &pull_request.evidence {
        None => add("evidence", "none: Harvest has not run a check".to_owned()),
        Some(evidence) => {
            let (commit, exit) = (short_commit(&evidence.commit), describe_exit(evidence.exit));
            let time = human_millis(evidence.millis);
            let (check, outcome) = (&evidence.check, evidence.outcome);
            add("evidence", format!("{check} on {commit}: {outcome} ({exit}) in {time}"));
            add("", "run by Harvest in a sandbox the agent never touched".to_owned());
        }
    }
    sanitize(&text) + "\n" + &markdown_text(pull_request.body.trim_end(), style)
}

//! `harvest pr`: shows a session's pull requests with the result of Harvest's own check, opens,
//! changes and merges them.

use anyhow::{Result, bail};
use harvest_proto::api::{
    CreatePullRequest, MergePullRequest, PULL_REQUEST_BEGIN, PULL_REQUEST_END, PullRequest,
    PullRequestState, SessionRepository, UpdatePullRequest,
};

use super::verify::evidence_lines;
use crate::{
    Invocation,
    cli::{CreatePrArgs, MergePrArgs, PrCommand, PrTextArgs, SessionArg, UpdatePrArgs},
    printer::Advice,
    render::markdown_text,
    sanitize::sanitize,
    style::Palette,
};

pub(crate) async fn run(ctx: &Invocation, verb: &PrCommand) -> Result<u8> {
    match verb {
        PrCommand::Show(args) => show(ctx, args).await,
        PrCommand::Create(args) => create(ctx, args).await,
        PrCommand::Update(args) => update(ctx, args).await,
        PrCommand::Merge(args) => merge(ctx, args).await,
    }
}

async fn show(ctx: &Invocation, args: &SessionArg) -> Result<u8> {
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

async fn create(ctx: &Invocation, args: &CreatePrArgs) -> Result<u8> {
    let PrTextArgs { session, repository, title, body } = &args.text;
    let (client, id) = ctx.session(&session.session).await?;
    let create = CreatePullRequest {
        repository: repository.clone(),
        title: title.clone(),
        body: body.clone(),
        draft: draft(args.draft, args.ready),
    };
    for opened in client.pull_request_create(&id, &create).await? {
        ctx.print.result(&opened, line)?;
    }
    Ok(0)
}

async fn update(ctx: &Invocation, args: &UpdatePrArgs) -> Result<u8> {
    let PrTextArgs { session, repository, title, body } = &args.text;
    let draft = draft(args.draft, args.ready);
    if title.is_none() && body.is_none() && draft.is_none() {
        let hint = "give --title, --body, --ready or --draft";
        bail!(Advice::usage("nothing to change", hint));
    }
    let (client, id) = ctx.session(&session.session).await?;
    let (repository, title, body) = (repository.clone(), title.clone(), body.clone());
    let update = UpdatePullRequest { repository, title, body, draft };
    ctx.print.result(&client.pull_request_update(&id, &update).await?, line)?;
    Ok(0)
}

/// What the flags `--draft` and `--ready` ask for.
fn draft(draft: bool, ready: bool) -> Option<bool> {
    draft.then_some(true).or(ready.then_some(false))
}

async fn merge(ctx: &Invocation, args: &MergePrArgs) -> Result<u8> {
    let (client, id) = ctx.session(&args.session.session).await?;
    let merge = MergePullRequest { repository: args.repository.clone() };
    ctx.print.result(&client.pull_request_merge(&id, &merge).await?, line)?;
    Ok(0)
}

/// `local/calc #1 open http://…`
fn line(repository: &SessionRepository) -> String {
    let Some(pull) = &repository.pr else { return format!("{}\n", repository.name) };
    let line = format!("{} #{} {}  {}\n", repository.name, pull.number, state(pull), pull.url);
    sanitize(&line)
}

fn state(pull: &PullRequest) -> String {
    let draft = pull.draft && pull.state == PullRequestState::Open;
    format!("{}{}", pull.state, if draft { " (draft)" } else { "" })
}

/// Formats a pull request as lines of `name  value`, followed by its rendered description.
pub(crate) fn text(pull_request: &PullRequest, style: Palette) -> String {
    let mut text = String::new();
    let mut add = |name: &str, value: String| text += &format!("{name:<14}{value}\n");
    add("pull request", format!("#{} {}", pull_request.number, state(pull_request)));
    add("url", pull_request.url.clone());
    add("title", pull_request.title.clone());
    add("branch", format!("{} → {}", pull_request.branch, pull_request.base));
    add("commit", pull_request.commit.clone());
    match &pull_request.evidence {
        None => add("evidence", "none: Harvest has not run a check".to_owned()),
        Some(evidence) => {
            let mut lines = evidence_lines(evidence);
            lines.insert(1, ("", "run by Harvest in a sandbox the agent never touched".to_owned()));
            lines.into_iter().for_each(|(name, value)| add(name, value));
        }
    }
    sanitize(&text) + "\n" + &markdown_text(&own_text(&pull_request.body), style)
}

/// A description without the part that Harvest writes, which says what is shown above it.
fn own_text(body: &str) -> String {
    let Some((above, rest)) = body.split_once(PULL_REQUEST_BEGIN) else {
        return body.trim_end().to_owned();
    };
    let below = rest.split_once(PULL_REQUEST_END).map_or("", |(_, below)| below);
    format!("{}\n\n{}", above.trim_end(), below.trim()).trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_text_is_around_harvests_part() {
        assert_eq!(own_text("by hand\n"), "by hand");
        let body = format!("above\n\n{PULL_REQUEST_BEGIN}\n- x\n{PULL_REQUEST_END}");
        assert_eq!(own_text(&body), "above");
        assert_eq!(own_text(&format!("{body}\nbelow\n")), "above\n\nbelow");
    }
}

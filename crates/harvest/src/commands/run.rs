//! `harvest run`: creates a session and follows it until it is done.

use std::time::Duration;

use anyhow::{Context, Result};
use harvest_proto::{
    AgentName, Hint as _, ModelRef,
    api::{CreateSession, ModelService, ServiceModels, UnusableModel},
    suggest::edit_distance,
};

use super::{
    exec::variables,
    watch::{self, StopWhen},
};
use crate::{
    Invocation, attachments, backend::Backend, cli::RunArgs, client::Client, inputs,
    printer::Advice, prompt_input::PromptSource, resolve,
};

// The session is created meanwhile, which takes a second.
const LIST_TIMEOUT: Duration = Duration::from_secs(3);

/// Models that a warning names, the most similar first.
const MAX_NAMED: usize = 5;

pub(crate) async fn run(ctx: &Invocation, args: RunArgs) -> Result<u8> {
    let prompt = PromptSource::one(args.prompt)?;
    let client = Client::find(&ctx.config)?;
    let agent = args.agent.clone().unwrap_or_default();
    check_model_key(&client, &agent, args.model.as_ref()).await?;
    let prompt = prompt.read()?;
    let attachments = attachments::read(&args.attach)?;
    let env = variables(&args.env)?;
    let from = match args.from {
        Some(typed) => {
            Some(resolve::snapshot(&Backend::from_client(client.clone()), &typed).await?)
        }
        None => None,
    };
    let mut repositories =
        inputs::repositories(ctx, &client, &args.repositories, args.all, from.is_some()).await?;
    if let (Some(first), Some(base)) = (repositories.first_mut(), args.base) {
        first.base = Some(base);
    }
    let request = CreateSession {
        repositories,
        prompt: Some(prompt),
        agent: args.agent,
        model: args.model,
        effort: args.effort,
        attachments,
        network: args.net,
        allow: args.allow,
        env,
        no_questions: args.no_questions,
        from,
        key: args.key,
        ..CreateSession::default()
    };
    let (session, warning) = tokio::join!(
        client.create(&request),
        model_warning(&client, &agent, request.model.as_ref())
    );
    let session = session.context("cannot create a session")?;
    if let Some(warning) = warning {
        ctx.print.warn(warning);
    }
    if args.detach {
        ctx.print.result(&session, |session| format!("{}\n", session.id))?;
        ctx.print.hint(format!("`harvest attach {}` follows it", session.id));
        return Ok(0);
    }
    if ctx.print.json {
        ctx.print.item(&session)?;
    }
    ctx.print.note(format!(
        "Created {} on {} (Ctrl-C detaches; the session keeps running)",
        session.id, session.branch
    ));
    let result = watch::follow(ctx, &client, &session.id, 0, StopWhen::Idle).await?;
    Ok(watch::exit_code(ctx, &session.id, result))
}

/// A warning about a model that its service does not list. A service that does not answer in time
/// is not waited for.
async fn model_warning(
    client: &Client,
    agent: &AgentName,
    model: Option<&ModelRef>,
) -> Option<String> {
    model?.name()?;
    let services = client.all::<ServiceModels>("/v1/models");
    let services = tokio::time::timeout(LIST_TIMEOUT, services).await.ok()?.ok()?;
    unlisted(&services, agent, model?)
}

fn unlisted(services: &[ServiceModels], agent: &AgentName, model: &ModelRef) -> Option<String> {
    let (upstream, name) = (model.upstream(), model.name()?);
    let serves = |one: &&ServiceModels| match &upstream {
        Some(upstream) => one.service.name == *upstream,
        None => one.service.agents.contains(agent),
    };
    let ServiceModels { service, models, .. } = services.iter().find(serves)?;
    // Services accept names without their date, and agents the name of a family.
    let is_listed = |one: &String| {
        one == name
            || one.strip_prefix(name).is_some_and(|rest| rest.starts_with('-'))
            || one.split('-').any(|part| part == name)
    };
    if models.is_empty() || models.iter().any(is_listed) {
        return None;
    }
    let mut known = models.clone();
    known.sort_by_key(|one| edit_distance(name, one));
    known.truncate(MAX_NAMED);
    let more = if models.len() > MAX_NAMED { "; `harvest models` lists all" } else { "" };
    let service = &service.name;
    Some(format!(
        "the model service `{service}` lists no model `{name}`, but {}{more}",
        known.join(", ")
    ))
}

/// Refuses before a folder is copied and a repository registered. The server checks again.
async fn check_model_key(
    client: &Client,
    agent: &AgentName,
    model: Option<&ModelRef>,
) -> Result<()> {
    let services: Vec<ModelService> = client.all("/v1/model-services").await?;
    UnusableModel::check(&services, agent, model).map_err(|error| {
        let hint = error.hint().unwrap_or_default().into_owned();
        Advice::new(error.to_string(), hint).into()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_unlisted_models_are_warned_about() {
        let mut services: Vec<_> = ModelService::built_in()
            .into_iter()
            .map(|service| ServiceModels { service, models: Vec::new(), problem: None })
            .collect();
        let warning = |services: &[ServiceModels], model: &str| {
            unlisted(services, &AgentName::Claude, &model.parse().unwrap())
        };
        assert_eq!(warning(&services, "claude-x"), None, "the list is not known");
        services[0].models =
            ["claude-sonnet-4-5-20250929", "claude-opus-4-1"].map(str::to_owned).into();
        for known in ["claude-opus-4-1", "claude-sonnet-4-5", "sonnet", "scripted", "openai/gpt"] {
            assert_eq!(warning(&services, known), None, "{known}");
        }
        let text = warning(&services, "anthropic/claude-opus-5").unwrap();
        assert!(text.contains("`anthropic` lists no model `claude-opus-5`"), "{text}");
        assert!(text.contains("but claude-opus-4-1, claude-sonnet"), "{text}");
    }
}

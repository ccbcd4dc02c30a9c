//! `harvest run`: creates a session and follows it until it is done.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context, Result};
use harvest_proto::{
    AgentName, Hint as _, ModelRef, Secret, UpstreamName,
    api::{CreateSession, ModelService, ServiceModels, UnusableModel},
    suggest::edit_distance,
};

use super::{
    exec::variables,
    secret,
    watch::{self, StopWhen},
};
use crate::{
    Invocation, attachments, backend::Backend, cli::RunArgs, client::Client, inputs,
    printer::Advice, prompt_input::PromptSource, resolve,
};

// The session is created meanwhile.
const LIST_TIMEOUT: Duration = Duration::from_secs(1);

/// Names that Claude Code resolves itself, also with `CLAUDE_LONG_CONTEXT` after them.
const CLAUDE_ALIASES: [&str; 6] = ["default", "best", "opus", "sonnet", "haiku", "opusplan"];
const CLAUDE_LONG_CONTEXT: &str = "[1m]";

/// Models that a warning names, the most similar first.
const MAX_NAMED: usize = 5;

pub(crate) async fn run(ctx: &Invocation, args: RunArgs) -> Result<u8> {
    let prompt = PromptSource::one(args.prompt)?;
    let client = Client::find(&ctx.config)?;
    let agent = args.agent.clone().unwrap_or_default();
    let secrets = secret::given(ctx, &args.secrets, prompt != PromptSource::Stdin).await?;
    let others = inputs::any_registered(ctx, &client, &args.repositories);
    let service = check_model_key(&client, &agent, args.model.as_ref(), &secrets, others).await?;
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
        budget_micros: args.budget,
        env,
        secrets,
        no_questions: args.no_questions,
        pr_mode: args.pr.as_deref().and_then(|word| word.parse().ok()),
        from,
        key: args.key,
        ..CreateSession::default()
    };
    let (session, warning) = tokio::try_join!(
        async { client.create(&request).await.context("cannot create a session") },
        async {
            anyhow::Ok(model_warning(&client, &agent, &service, request.model.as_ref()).await)
        },
    )?;
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
    service: &UpstreamName,
    model: Option<&ModelRef>,
) -> Option<String> {
    let name = model?.name()?;
    let path = format!("/v1/models?service={service}");
    let services = client.all::<ServiceModels>(&path);
    let services = tokio::time::timeout(LIST_TIMEOUT, services).await.ok()?.ok()?;
    unlisted(services.first()?, agent, name)
}

fn unlisted(listed: &ServiceModels, agent: &AgentName, name: &str) -> Option<String> {
    let ServiceModels { service, models, .. } = listed;
    let claude = *agent == AgentName::Claude;
    let plain = name.strip_suffix(CLAUDE_LONG_CONTEXT).filter(|_| claude).unwrap_or(name);
    if models.is_empty() || (claude && CLAUDE_ALIASES.contains(&plain)) {
        return None;
    }
    // Services accept names without their date.
    let is_listed = |one: &String| {
        one.strip_prefix(plain).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
    };
    if models.iter().any(is_listed) {
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

/// The service of the session's model. Refuses before a folder is copied and a repository
/// registered; the server checks again. A repository that is registered may have the key itself,
/// which only the server knows.
async fn check_model_key(
    client: &Client,
    agent: &AgentName,
    model: Option<&ModelRef>,
    secrets: &BTreeMap<String, Secret<String>>,
    any_registered: impl Future<Output = Result<bool>>,
) -> Result<UpstreamName> {
    let mut services: Vec<ModelService> = client.all("/v1/model-services").await?;
    services.iter_mut().for_each(|service| service.accept_key_of(secrets));
    match UnusableModel::check(&services, agent, model) {
        Err(UnusableModel::NoKey { .. }) if any_registered.await? => {}
        checked => checked.map_err(|error| {
            let hint = error.hint().unwrap_or_default().into_owned();
            Advice::new(error.to_string(), hint)
        })?,
    }
    let usual = services.into_iter().find(|service| service.agents.contains(agent));
    let named = model.and_then(ModelRef::upstream);
    named.or_else(|| usual.map(|usual| usual.name)).context("no model service has this agent")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_unlisted_models_are_warned_about() {
        let service = ModelService::built_in().remove(0);
        let mut listed = ServiceModels { service, models: Vec::new(), problem: None };
        let warning =
            |listed: &ServiceModels, name: &str| unlisted(listed, &AgentName::Claude, name);
        assert_eq!(warning(&listed, "claude-x"), None, "the list is not known");
        listed.models = ["claude-sonnet-4-5-20250929", "claude-opus-4-1"].map(str::to_owned).into();
        for known in ["claude-opus-4-1", "claude-sonnet-4-5"] {
            assert_eq!(warning(&listed, known), None, "{known}");
        }
        let text = warning(&listed, "claude-opus-5").unwrap();
        assert!(text.contains("`anthropic` lists no model `claude-opus-5`"), "{text}");
        assert!(text.contains("but claude-opus-4-1, claude-sonnet"), "{text}");
    }

    #[test]
    fn aliases_of_claude_cause_no_warning() {
        let service = ModelService::built_in().remove(0);
        let models = vec!["claude-opus-4-1".to_owned()];
        let listed = ServiceModels { service, models, problem: None };
        for alias in ["sonnet", "opusplan", "opus[1m]", "claude-opus-4-1[1m]"] {
            assert_eq!(unlisted(&listed, &AgentName::Claude, alias), None, "{alias}");
            assert!(unlisted(&listed, &AgentName::Codex, alias).is_some(), "{alias}");
        }
    }
}

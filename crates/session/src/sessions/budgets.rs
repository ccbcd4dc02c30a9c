//! Budgets: sets limits, and continues a session that waits for one.

use harvest_proto::{
    Money, SessionId, SpendingScope, Timestamp,
    api::{Budget, Session, Spending},
    bridge::Author,
    budget_command,
};
use harvest_store::{BudgetOwner, Write};

use super::{Sessions, verbs::new_prompt};
use crate::{
    decide::{Mode, State},
    driver::{Command, PromptCommand},
    error::SessionError,
    error_chain::error_chain,
    ledger::raise_command,
    wall_clock::now,
};

/// The prompt of a session that a budget had stopped.
const CONTINUE: &str = "The budget was raised. Continue where you stopped.";

const MAX_EMAIL_CHARS: usize = 200;

const MAX_SUMS: u32 = 1000;

impl Sessions {
    /// Sets or removes the budget of a session. One that waits for it, and may spend again,
    /// continues: a prompt is stored together with the budget. Sessions that its agent created
    /// follow.
    ///
    /// # Errors
    /// When there is no such session.
    pub async fn set_session_budget(
        &self,
        session: &SessionId,
        limit: Option<Money>,
        user: Author,
    ) -> Result<(), SessionError> {
        let Session { spent_micros: spent, author, .. } = self.get(session).await?;
        let handle = self.handle(session).await?;
        let writes = vec![Write::Budget(limit)];
        let can_spend = limit.is_none_or(|limit| limit > spent);
        let continues = can_spend && waits_for_budget(&handle.view.borrow());
        let done = if continues {
            let text = CONTINUE.parse().expect("it is not empty");
            let new = new_prompt(text, if user.is_known() { user } else { author });
            let command = |reply| PromptCommand { new, now: false, writes, reply };
            let prompt = |reply| Command::Prompt(Box::new(command(reply)));
            handle.call(prompt).await.map(drop)
        } else {
            let (store, lease) = (&self.shared.store, self.shared.lease);
            let committed = store.session_commit(session, lease, now(), writes).await;
            committed.map(drop).map_err(Into::into)
        };
        self.not_found_if_deleted(session, done).await?;
        if can_spend {
            self.continue_waiting(&BudgetOwner::Session(session.clone())).await?;
        }
        Ok(())
    }

    /// Continues the sessions whose last turn this budget has stopped, oldest first. Each call of
    /// theirs is held before it is made, so that the budget decides how many get on. A server that
    /// is killed meanwhile continues the others when the budget is set again.
    async fn continue_waiting(&self, owner: &BudgetOwner) -> Result<(), SessionError> {
        for (session, message) in self.shared.store.session_over_budget().await? {
            if !is_stopped_by(owner, &message) {
                continue;
            }
            let continued = self.continue_session(&session).await;
            if let Err(error) = continued {
                tracing::warn!(%session, error = error_chain(&error), "a session does not continue");
            }
        }
        Ok(())
    }

    /// Stores the prompt that continues a session, if it still waits for a budget.
    async fn continue_session(&self, session: &SessionId) -> Result<(), SessionError> {
        let handle = self.handle(session).await?;
        if !waits_for_budget(&handle.view.borrow()) {
            return Ok(());
        }
        let author = self.get(session).await?.author;
        let text = CONTINUE.parse().expect("it is not empty");
        let new = new_prompt(text, author);
        let command = |reply| PromptCommand { new, now: false, writes: Vec::new(), reply };
        let prompt = |reply| Command::Prompt(Box::new(command(reply)));
        handle.call(prompt).await.map(drop)
    }

    /// Sets or removes the budget of a repository, of a user or of every day. Sessions that wait
    /// for it continue if it has money left.
    ///
    /// # Errors
    /// When there is no such repository, or the user's address is invalid.
    pub async fn set_budget(
        &self,
        owner: &BudgetOwner,
        limit: Option<Money>,
    ) -> Result<Budget, SessionError> {
        match owner {
            BudgetOwner::Repository(name) => {
                self.shared.repositories.get(name).await?;
            }
            BudgetOwner::User(email) => check_email(email)?,
            BudgetOwner::Session(_) | BudgetOwner::Day => {}
        }
        let budget = self.shared.store.budget_set(owner, limit, now()).await?;
        if limit.is_none_or(|limit| limit > budget.spent_micros) {
            self.continue_waiting(owner).await?;
        }
        Ok(budget)
    }

    /// The budget of the day, and those of repositories and users that have a limit.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn budgets(&self) -> Result<Vec<Budget>, SessionError> {
        Ok(self.shared.store.budget_list(now()).await?)
    }

    /// What model calls and sandboxes used since a time, the most expensive first.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn spending(
        &self,
        by: SpendingScope,
        since: Timestamp,
    ) -> Result<Vec<Spending>, SessionError> {
        // Up to date, also between two readings of the job.
        self.shared.sandboxes.meter.read_all().await?;
        Ok(self.shared.store.spending(by, since, MAX_SUMS).await?)
    }
}

/// Whether a budget is the one that a turn's error names.
fn is_stopped_by(owner: &BudgetOwner, message: &str) -> bool {
    let raised = match owner {
        BudgetOwner::Session(session) => {
            raise_command(SpendingScope::Session, &session.to_string())
        }
        BudgetOwner::Repository(name) => raise_command(SpendingScope::Repository, name.as_str()),
        BudgetOwner::User(email) => raise_command(SpendingScope::User, &email.to_lowercase()),
        BudgetOwner::Day => raise_command(SpendingScope::Day, ""),
    };
    budget_command(message) == Some(&raised)
}

fn waits_for_budget(state: &State) -> bool {
    state.over_budget && state.queue.is_empty() && state.mode != Mode::Archived
}

fn check_email(email: &str) -> Result<(), SessionError> {
    let fits = (3..=MAX_EMAIL_CHARS).contains(&email.chars().count());
    match fits && email.contains('@') && !email.chars().any(char::is_control) {
        true => Ok(()),
        false => {
            let what =
                format!("an e-mail address has an `@` and at most {MAX_EMAIL_CHARS} letters");
            Err(SessionError::invalid("invalid_email", what))
        }
    }
}

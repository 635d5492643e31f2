//! Tests of logins: shared logins, suspect logins, back-off, and secrets in errors.

use super::*;

fn session() -> Session {
    let credentials = Credentials {
        user: "root".into(),
        password: "new".into(),
        former: vec!["old".into()],
    };
    Session::new(Some(credentials), false)
}

#[tokio::test]
async fn calls_share_login_until_login_is_stale() {
    let (session, asked) = (session(), AtomicUsize::new(0));
    let ask = |_: String, _: Credentials| {
        let count = asked.fetch_add(1, Ordering::SeqCst);
        async move { Answer::Token(format!("token{count}.1"), 0) }
    };
    let first = session.ensure("a", None, ask).await.unwrap().unwrap();
    assert_eq!(first.0, Login::Accepted);
    assert_eq!(
        session.ensure("b", None, ask).await.unwrap(),
        Some(first.clone())
    );
    assert_eq!(asked.load(Ordering::SeqCst), 1);
    let next = session.ensure("b", Some(first.1), ask).await.unwrap();
    assert_ne!(next, Some(first));
    assert_eq!(asked.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn other_member_issues_token_if_called_member_does_not() {
    let session = session();
    session.set_members(&["learner".to_owned(), "voter".to_owned()]);
    let ask = |member: String, _: Credentials| async move {
        match member.as_str() {
            "voter" => Answer::Token("t.1".into(), 1),
            _ => Answer::Unavailable,
        }
    };
    let found = session.ensure("learner", None, ask).await.unwrap();
    assert_eq!(found.map(|found| found.0), Some(Login::Former));
}

#[tokio::test]
async fn rejected_login_error_has_no_password_and_is_cached() {
    let (session, asked) = (session(), AtomicUsize::new(0));
    let ask = |_: String, _: Credentials| {
        asked.fetch_add(1, Ordering::SeqCst);
        async { Answer::Rejected }
    };
    for _ in 0..3 {
        let error = session.ensure("a", None, ask).await.unwrap_err();
        let text = error.to_string();
        assert!(text.contains("user root"), "{text}");
        assert!(!text.contains("new") && !text.contains("old"), "{text}");
    }
    assert_eq!(asked.load(Ordering::SeqCst), 1);
}

/// Without a quorum, no member issues a token. `ensure` then returns no login and no error, because a call may need no
/// token.
#[tokio::test]
async fn login_backs_off_if_no_member_answers() {
    let (session, asked) = (session(), AtomicUsize::new(0));
    let ask = |_: String, _: Credentials| {
        asked.fetch_add(1, Ordering::SeqCst);
        async { Answer::Unavailable }
    };
    for _ in 0..3 {
        assert_eq!(session.ensure("a", None, ask).await.unwrap(), None);
    }
    assert_eq!(asked.load(Ordering::SeqCst), 1);
}

fn presented_token(session: &Session) -> Option<String> {
    let token = session.token.read().unwrap();
    token
        .as_ref()
        .map(|token| token.to_str().unwrap().to_owned())
}

#[tokio::test]
async fn suspect_login_is_used_until_new_login_exists() {
    let session = session();
    let gives = |token: &'static str| {
        move |_: String, _: Credentials| async move { Answer::Token(token.into(), 0) }
    };
    let silent = |_: String, _: Credentials| async { Answer::Unavailable };
    let first = session.ensure("a", None, gives("a.9")).await.unwrap();
    let first = first.map(|(_, number)| number);
    // The login does not become suspect if the call gets a response, or if the caller drops the call at once.
    unanswered_call(&session, first).await.answered();
    drop(session.watch(first, &NOT_HEDGED));
    assert_eq!(session.take_suspect(), None);
    // The login does not become suspect if another member responds first, because the called member may only be slow.
    let overtaken = AtomicBool::new(false);
    let watch = session.watch(first, &overtaken);
    tokio::time::sleep(MIN_UNANSWERED).await;
    overtaken.store(true, Ordering::Relaxed);
    drop(watch);
    assert_eq!(session.take_suspect(), None);
    drop(unanswered_call(&session, first).await);
    let suspect = session.take_suspect();
    assert_eq!(suspect, first);
    assert_eq!(
        session.take_suspect(),
        None,
        "a suspect login must be returned once"
    );
    session.ensure("a", suspect, silent).await.unwrap();
    assert_eq!(presented_token(&session).as_deref(), Some("a.9"));
    assert_eq!(session.login_number(), first);
    // The same login does not become suspect again for some time. The test skips this time by clearing `since`. A
    // call with a replaced login makes no login suspect.
    drop(unanswered_call(&session, first).await);
    assert_eq!(session.take_suspect(), None);
    session.found().suspect.since = None;
    session.found().no_answer_since = None;
    drop(unanswered_call(&session, first).await);
    let suspect = session.take_suspect();
    assert_eq!(suspect, first);
    session.ensure("a", suspect, gives("b.1")).await.unwrap();
    assert_eq!(presented_token(&session).as_deref(), Some("b.1"));
    session.found().suspect.since = None;
    drop(unanswered_call(&session, first).await);
    assert_eq!(session.take_suspect(), None);
}

async fn unanswered_call(session: &Session, login: Option<u64>) -> PendingCall<'_> {
    let watch = session.watch(login, &NOT_HEDGED);
    tokio::time::sleep(MIN_UNANSWERED).await;
    watch
}

#[tokio::test]
async fn client_with_certificate_suspends_suspect_login() {
    let certified = Session {
        with_certificate: true,
        ..session()
    };
    let gives = |_: String, _: Credentials| async { Answer::Token("a.9".into(), 0) };
    let first = certified.ensure("a", None, gives).await.unwrap();
    let first = first.map(|(_, number)| number);
    drop(unanswered_call(&certified, first).await);
    assert_eq!(
        (presented_token(&certified), certified.login_number()),
        (None, None)
    );
    assert_eq!(certified.current(), Some(Login::Accepted));
    // `restore_login` returns the suspended login once. The client calls it if the member does not accept the
    // certificate.
    assert_eq!(certified.restore_login(), first);
    assert_eq!(presented_token(&certified).as_deref(), Some("a.9"));
    assert_eq!(certified.restore_login(), None);
}

#[tokio::test]
async fn client_without_credentials_attempts_no_login() {
    let session = Session::new(None, false);
    let ask = |_: String, _: Credentials| async { Answer::Rejected };
    assert_eq!(session.ensure("a", None, ask).await.unwrap(), None);
}

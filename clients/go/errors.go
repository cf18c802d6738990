package runnerd

import (
	"errors"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Violation says what is wrong with one field of a request, or which quota is used up.
type Violation struct {
	// Subject is the field, such as "sampling.top_p", or the quota.
	Subject string
	// Description is for people.
	Description string
}

// ErrorDetails is what the server says about a failed call.
type ErrorDetails struct {
	// Code is the gRPC status code; Unknown for an error that is not gRPC's.
	Code codes.Code
	// Message is for people.
	Message string
	// Reason is the server's stable name of the error, such as "INVALID_REQUEST"; empty when it gave none.
	Reason string
	// Fields are the wrong fields of the request, with InvalidArgument.
	Fields []Violation
	// Quotas are the quotas that are used up, with ResourceExhausted.
	Quotas []Violation
	// RetryAfter is how long to wait before trying again; nil when the server does not say.
	RetryAfter *time.Duration
}

// Details reads the details of an error that a stub or a Stream gave, also when it is wrapped.
func Details(err error) ErrorDetails {
	var carrier interface{ GRPCStatus() *status.Status }
	if !errors.As(err, &carrier) {
		return ErrorDetails{Code: codes.Unknown, Message: err.Error()}
	}
	found := carrier.GRPCStatus()
	details := ErrorDetails{Code: found.Code(), Message: found.Message()}
	for _, detail := range found.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			details.Reason = detail.Reason
		case *errdetails.BadRequest:
			for _, violation := range detail.FieldViolations {
				details.Fields = append(details.Fields, Violation{violation.Field, violation.Description})
			}
		case *errdetails.QuotaFailure:
			for _, violation := range detail.Violations {
				details.Quotas = append(details.Quotas, Violation{violation.Subject, violation.Description})
			}
		case *errdetails.RetryInfo:
			delay := detail.RetryDelay
			after := time.Duration(delay.GetSeconds())*time.Second + time.Duration(delay.GetNanos())
			details.RetryAfter = &after
		}
	}
	return details
}
